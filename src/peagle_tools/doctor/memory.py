"""What drafting takes of a GPU's memory, for ``doctor --model ... --speculative-config ...``. Imports vLLM."""

from collections.abc import Mapping
from typing import Any, NoReturn

from peagle_tools.shared.errors import ToolError

MEGA = 1_000_000


def drafting(flags: list[str]) -> dict[str, Any]:
    """Configure vLLM as ``vllm serve`` would, load nothing, and say what drafting on Model Runner V2 would take.

    Args:
        flags: of ``vllm serve``, those of its engine.

    Returns:
        The settings that decide it, and ``v2.memory.draft_memory``.

    Raises:
        ToolError: flags or a configuration that vLLM refuses, or one that is not P-EAGLE.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from peagle_vllm import plugin
    from peagle_vllm.heads.files import one_line
    from peagle_vllm.serving import is_peagle
    from peagle_vllm.v2.memory import draft_memory

    plugin.register()

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ToolError(message)  # without pages of usage

    arguments = EngineArgs.from_cli_args(EngineArgs.add_cli_args(Parser()).parse_args(flags))
    try:
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # vLLM's errors are of many kinds; each says what it refuses
        raise ToolError(one_line(error)) from error
    if not is_peagle(config):
        raise ToolError('not P-EAGLE: the speculative config needs "parallel_drafting": true and an EAGLE-3 head')
    scheduler = config.scheduler_config
    return {
        "runner": "V2" if config.use_v2_model_runner else "V1 (what follows is V2's)",
        "num_speculative_tokens": config.num_speculative_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        **draft_memory(config),
    }


def lines(sizes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what ``drafting`` returned, to print."""
    graphs = "none: this platform or configuration has no CUDA graphs"
    if sizes["full_graphs"] or sizes["piecewise_graphs"]:
        full = f"{sizes['full_graphs']} full (decode batches of up to {sizes['full_graph_requests']:,} requests)"
        graphs = f"{full}, {sizes['piecewise_graphs']} piecewise (batches of up to {sizes['piecewise_rows']:,} rows)"
    batch = f"max_num_seqs {sizes['max_num_seqs']:,}, max_num_batched_tokens {sizes['max_num_batched_tokens']:,}"
    weights = f"{sizes['head_weights_bytes'] / MEGA:,.0f} MB of fc, layers and lm_head"
    return [
        ("drafting", f"K = {sizes['num_speculative_tokens']}, {batch}, Model Runner {sizes['runner']}"),
        ("head", f"{weights}, {sizes['head_kv_bytes_per_token']:,} bytes of KV cache a token"),
        ("graphs", graphs),
        ("draft buffers", f"{sizes['buffers_bytes'] / MEGA:,.0f} MB, the graphs' own memory apart"),
        ("largest step", f"{sizes['largest_step_bytes'] / MEGA:,.0f} MB, off the KV cache"),
    ]
