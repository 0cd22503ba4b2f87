"""What drafting takes of a GPU, for ``peagle-vllm doctor --target ... --speculative-config ...``. Imports vLLM."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MEGA = 1_000_000


class DraftingError(ValueError):
    """The configuration is none that vLLM would serve. One line."""


@dataclass(frozen=True)
class Drafting:
    """What one configuration captures and keeps on Model Runner V2. Sizes in bytes.

    Attributes:
        full_graphs: FULL graphs, of decode batches with up to ``full_graph_requests`` requests.
        piecewise_graphs: PIECEWISE graphs, of batches with up to ``piecewise_rows`` draft rows.
        buffers: what stays allocated. Graphs themselves come on top; vLLM's log has their size.
        largest_step: what the largest batch takes for its own step, counted in vLLM's profiling run.
    """

    runner: str
    num_speculative_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    full_graphs: int
    full_graph_requests: int
    piecewise_graphs: int
    piecewise_rows: int
    buffers: int
    largest_step: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """(name, value) for people."""
        graphs = "none: this platform or configuration has no CUDA graphs"
        if self.full_graphs or self.piecewise_graphs:
            graphs = (
                f"{self.full_graphs} full (decode batches of up to {self.full_graph_requests:,} requests), "
                f"{self.piecewise_graphs} piecewise (batches of up to {self.piecewise_rows:,} rows)"
            )
        told = f"K = {self.num_speculative_tokens}, max_num_seqs {self.max_num_seqs:,}"
        return [
            ("drafting", f"{told}, max_num_batched_tokens {self.max_num_batched_tokens:,}, Model Runner {self.runner}"),
            ("graphs", graphs),
            ("draft buffers", f"{self.buffers / MEGA:,.0f} MB"),
            ("largest step", f"{self.largest_step / MEGA:,.0f} MB, off the KV cache"),
        ]


def drafting(target: str, speculative_config: str, flags: Mapping[str, Any]) -> Drafting:
    """Configure vLLM as ``vllm serve`` would, load nothing, and say what drafting would take.

    Args:
        speculative_config: JSON, as ``vllm serve`` takes it.
        flags: more arguments of ``EngineArgs``; None leaves one to vLLM's default for this machine.

    Raises:
        DraftingError: JSON that is none, a configuration that vLLM refuses, or one that is not P-EAGLE.
    """
    try:
        speculative = json.loads(speculative_config)
    except json.JSONDecodeError as error:
        raise DraftingError(f"--speculative-config is no JSON ({error})") from None
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from peagle_vllm import plugin
    from peagle_vllm.heads.files import one_line
    from peagle_vllm.serving import is_peagle
    from peagle_vllm.v2.memory import draft_memory

    plugin.register()
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        arguments = EngineArgs(model=target, speculative_config=speculative, **given)
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # vLLM's errors are of many kinds; each says what it refuses
        raise DraftingError(one_line(error)) from error
    if not is_peagle(config):
        raise DraftingError('not P-EAGLE: the speculative config needs "parallel_drafting": true and an EAGLE-3 head')
    memory = draft_memory(config)
    graphs = memory.graphs
    return Drafting(
        runner="V2" if config.use_v2_model_runner else "V1 (what follows is V2's)",
        num_speculative_tokens=config.num_speculative_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        full_graphs=len(graphs.decode),
        full_graph_requests=graphs.max_num_reqs,
        piecewise_graphs=len(graphs.mixed),
        piecewise_rows=max(graphs.mixed, default=0),
        buffers=memory.buffers,
        largest_step=memory.largest_step,
    )
