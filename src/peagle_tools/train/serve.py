"""The target's vLLM server: it answers prompts, or writes the hidden states that a head reads."""

import json
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.shared.server import HOST, Server, ServerFailed
from peagle_tools.train.peagle_yaml import Config
from peagle_vllm.heads.target import read_target

START_SECONDS = 3600.0
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1"}
# One process with a thread on each core. vLLM's default on a CPU reserves a core for the scheduler, whose process spins
# there while the worker computes; to be dropped when vLLM lets it sleep (planned in vllm/utils/ompmultiprocessing.py).
ON_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def arguments(config: Config, hidden_states: Path | None = None) -> list[str]:
    """Arguments of ``vllm serve`` for the target; with a folder, its server writes the prompts' hidden states there.

    Those are of the layers that the head reads and, last, what leaves the target's last layer, which it learns from.
    """
    words: dict[str, Any] = {"model": config.target, "dtype": config.target_dtype, **config.engine}
    if hidden_states:
        from hs_connectors import FileBackend
        from vllm.platforms import current_platform

        layers = [*config.aux_layers, read_target(config.target).num_layers]
        transfer = FileBackend.build_kv_transfer_config(Namespace(hidden_states_path=str(hidden_states)))
        if current_platform.is_cpu():
            transfer |= {"kv_connector": "CpuHiddenStates", "kv_connector_module_path": "peagle_tools.train.cpu_states"}
        draft = {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}}
        words["speculative_config"] = {"method": "extract_hidden_states", "num_speculative_tokens": 1, **draft}
        words["kv_transfer_config"] = transfer
        # A prompt that begins like another one would be computed in other pieces, with other last bits.
        words["enable_prefix_caching"] = False
    flags: list[str] = []
    for name, value in words.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{option}" if value else f"--no-{option}")
        else:
            flags += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
    return flags


@contextmanager
def running(config: Config, log: Path, hidden_states: bool = False) -> Iterator[tuple[str, Server | None]]:
    """The address of the target's server, and the server, until the block ends.

    Where there is a ``data.endpoint``, that and None, but not for hidden states. ToolError where the server does not
    start, TryAgain where it ends.

    Args:
        hidden_states: it writes those of each prompt, into ``states.partial``: on one disk with where they belong.
    """
    if config.data.endpoint and not hidden_states:
        yield config.data.endpoint, None
        return
    from vllm.platforms import current_platform

    on_cpu = ON_CPU if current_platform.is_cpu() else {}
    env = ENVIRONMENT | {name: os.environ.get(name, value) for name, value in on_cpu.items()}  # the user's own first
    partial = config.run / "states.partial"
    shutil.rmtree(partial, ignore_errors=True)
    words, is_ready = arguments(config, partial if hidden_states else None), False
    try:
        with Server(words, cwd=Path.cwd(), env=env, log=log) as server:
            print(f"the target's server starts; its log: {log}", flush=True)
            server.wait_until_ready(START_SECONDS)
            is_ready = True
            try:
                yield f"http://{HOST}:{server.port}/v1", server
            except ToolError:
                server.check_well()  # where it is not, that is the reason
                raise
    except ServerFailed as error:
        if not is_ready:
            raise ToolError(f"{error}; its log: {log}") from None
        raise TryAgain(f"{error}; its log: {log}. What is done is kept: the same command continues") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
