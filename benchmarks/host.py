"""What one draft step costs the host: ``python -m benchmarks.host [--out FILE]``. Needs no GPU, and times none of one.

Counted, in one ``propose()`` of a decode batch and outside the drafter's forward: the tensor operations that PyTorch
dispatches (a ``TorchDispatchMode`` sees them; views and allocations apart) and the Triton launches. On a GPU each is
a launch or more. Every arm runs in a process of its own on the tiny models; the plugin's run under Triton's
interpreter, so that they launch what they launch on a GPU. V2 is counted again with FULL graphs whose replay does
nothing (``give_graphs``): what is left is what a GPU's host does, and the replays.
"""

import copy
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import arms
from benchmarks.arms import INTERPRETED_V2, STOCK, V1
from benchmarks.engines import generate, inside, small_llm

K, REQUESTS = 5, 4
ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
FULL, REDUCED = "tiny-llama-peagle", "tiny-llama-peagle-d2t"  # the draft vocabulary
# On a CPU without the interpreter V1 would run the kernels' twins: other operations than a GPU's.
INTERPRETED_V1 = V1 | {"TRITON_INTERPRET": "1"}

# arm -> its head and its environment
ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "stock V1": (FULL, V1 | STOCK),
    "stock V1, reduced vocabulary": (REDUCED, V1 | STOCK),
    "plugin V1": (FULL, INTERPRETED_V1),
    "plugin V1, reduced vocabulary": (REDUCED, INTERPRETED_V1),
    "plugin V2": (FULL, INTERPRETED_V2),
    "plugin V2, reduced vocabulary": (REDUCED, INTERPRETED_V2),
    "plugin V2, sharpened": ("tiny-llama-peagle-sharp", INTERPRETED_V2),
    "plugin V2, probabilistic": (FULL, INTERPRETED_V2),
    "EAGLE-3 V2": ("tiny-llama-eagle3", INTERPRETED_V2),
}
CONFIG = {"plugin V2, probabilistic": {"draft_sample_method": "probabilistic"}}  # more of an arm's speculative config


class Graph:
    """Stands for a captured graph."""

    replays = 0  # of all of them

    def replay(self) -> None:
        Graph.replays += 1


def give_graphs(drafter: Any, batches: Sequence[int], k: int) -> None:
    """FULL graphs for decode batches of these sizes, as with FlashAttention: metadata is refreshed inside them.

    Args:
        drafter: an ``EagleSpeculator``, of an engine without graphs that is still running.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu import cudagraph_utils

    drafter.vllm_config = copy.copy(drafter.vllm_config)
    compilation = drafter.vllm_config.compilation_config = copy.copy(drafter.vllm_config.compilation_config)
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    compilation.cudagraph_capture_sizes = sorted({*batches, *(n * (1 + k) for n in batches)})
    compilation.max_cudagraph_capture_size = max(batches) * (1 + k)
    if hasattr(drafter, "_allocate_buffers"):  # ours: as large as the largest graph
        drafter._allocate_buffers()
        attention = ("model_state", "kv_cache_config", "block_tables", "target_input_buffers", "target_attn_groups")
        drafter.set_attn(*(getattr(drafter, name) for name in attention))
    drafter.supports_decode_metadata_update = True
    drafter.attn_cg_support = SimpleNamespace(min_cg_support=AttentionCGSupport.UNIFORM_BATCH, min_cg_attn_backend=None)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    with patch.object(cudagraph_utils, "current_platform", platform):
        drafter.init_cudagraph_manager(compilation.cudagraph_mode)
    for manager in vars(drafter).values():
        if isinstance(manager, cudagraph_utils.CudaGraphManager):
            manager.graphs = {desc: Graph() for descs in manager._capture_descs.values() for desc in descs}
            manager._graphs_captured = True


class Counting(TorchDispatchMode):
    """Counts dispatched operations by name while ``on``."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.operations = False, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if self.on and not is_view and func.name().split(".")[0] not in ALLOCATIONS:
            self.operations[func.name()] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def switched(self, on: bool) -> Iterator[bool]:
        """Counting or not until the end of the block; yields whether it was on before."""
        before, self.on = self.on, on
        try:
            yield before
        finally:
            self.on = before


@contextmanager
def counted(drafter: Any) -> Iterator[list[dict[str, Any]]]:
    """One entry for each ``propose()`` of a full decode batch: its operations by name and its launches."""
    from triton.runtime.interpreter import GridExecutor
    from vllm.utils.torch_utils import async_tensor_h2d

    steps: list[dict[str, Any]] = []
    mode, launches, copies = Counting(), Counter[str](), Counter[str]()
    propose, forward, execute = drafter.propose, drafter.model.forward, GridExecutor.__call__

    def forward_uncounted(*args: Any, **kwargs: Any) -> Any:
        with mode.switched(False):
            return forward(*args, **kwargs)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mode.switched(False) as counting:
            launches[self.fn.__name__] += counting
            return execute(self, *args, **kwargs)

    def to_device(*args: Any, **kwargs: Any) -> Any:
        copies["async_tensor_h2d"] += mode.on
        return async_tensor_h2d(*args, **kwargs)

    def counting_propose(*args: Any, **kwargs: Any) -> Any:
        counters = {"operations": mode.operations, "launches": launches, "host_to_device": copies}
        for counter in counters.values():
            counter.clear()
        replays = Graph.replays
        with mode, mode.switched(True):
            drafts = propose(*args, **kwargs)
        found = {kind: dict(+counter) for kind, counter in counters.items()}
        steps.append({"requests": len(drafts), **found, "replays": Graph.replays - replays})
        return drafts

    with ExitStack() as stack:
        stack.enter_context(patch.object(drafter, "propose", counting_propose))
        stack.enter_context(patch.object(drafter.model, "forward", forward_uncounted))
        stack.enter_context(patch.object(GridExecutor, "__call__", launch))
        for module in list(sys.modules.values()):  # vLLM's one way to the device, wherever it was imported by name
            if getattr(module, "__dict__", {}).get("async_tensor_h2d") is async_tensor_h2d:
                stack.enter_context(patch.object(module, "async_tensor_h2d", to_device))
        yield steps


def count_arms(names: list[str]) -> list[dict[str, Any]]:
    """One decode step's draft of each arm, in this process, whose environment is theirs."""
    results = []
    sizes = {"max_model_len": 128, "max_num_seqs": REQUESTS, "max_num_batched_tokens": 512, "skip_tokenizer_init": True}
    for name in names:
        head, env = ARMS[name]
        llm = small_llm("tiny-llama", head, K, config=CONFIG.get(name), **sizes)
        results.append({"arm": name, **count_steps(llm)})
        if env == INTERPRETED_V2:
            give_graphs(inside(llm)[1], range(1, REQUESTS + 1), K)
            results[-1]["replayed"] = count_steps(llm)
        llm.llm_engine.engine_core.shutdown()  # for the next arm
    return results


def count_steps(llm: Any) -> dict[str, Any]:
    """The decode step that dispatched the most."""
    with counted(inside(llm)[1]) as steps:
        generate(llm, REQUESTS, 5, 16)
    decodes = [step for step in steps[1:] if step["requests"] == REQUESTS]  # the first is the prefill
    assert decodes, "no decode step with every request in it"
    step = max(decodes, key=lambda step: sum(step["operations"].values()))
    totals = {kind: sum(step[kind].values()) for kind in ("operations", "launches", "host_to_device")}
    totals["replays"] = step.pop("replays")
    return {"totals": totals, **step}


def measure() -> dict[str, Any]:
    """The report, from processes of their own."""
    counts = [found for name, (_, env) in ARMS.items() for found in arms.run(count_arms, env, names=[name])]
    print(arms.table([{"arm": arm["arm"], **arm["totals"]} for arm in counts]))
    return {"arms": counts}


if __name__ == "__main__":
    arms.main(__doc__, measure)
