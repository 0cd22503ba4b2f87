"""A decode batch's draft step: on the host one launch and one replay, in the graph nothing that a GPU refuses."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.engines import Request, Settings, engine
from tests.support.graphs import emulate
from tests.support.operations import Operations
from tests.support.random_heads import HeadSpec, prompt, write_pair

pytestmark = [pytest.mark.arm("plugin-v2"), pytest.mark.kernels]
ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
FORBIDDEN = (
    *("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"),
    *("aten::_to_copy", "aten::lift_fresh", "aten::repeat_interleave.Tensor"),
)


def is_work(operation: Any, values: Any) -> bool:
    """What a GPU's host would launch or copy: views and allocations are neither."""
    name = operation.name().split(".")[0]
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in operation._schema.returns)
    return (name == "aten::lift_fresh" or not is_view) and name not in ALLOCATIONS


def is_forbidden(operation: Any, values: Any) -> bool:
    """What a CUDA graph cannot hold: a sync (a boolean index makes one), or data that comes from the host."""
    indices = values[0][1] if operation.name().startswith(("aten::index.", "aten::index_put")) else ()
    is_masked = any(index is not None and index.dtype == torch.bool for index in indices)
    return is_masked or operation.name().startswith(FORBIDDEN)


@pytest.mark.parametrize("case", ["greedy", "selector", "probabilistic"])
def test_a_decode_step_is_one_launch_and_one_replay(case: str, tmp_path: Path) -> None:
    """A graph holds what follows prepare_inputs; the drafter's forward in it is vLLM's.

    Where vLLM pads the vocabulary (not 256), it masks the padding with a number that only a CPU copies.
    """
    method = (("draft_sample_method", "probabilistic"),) if case == "probabilistic" else ()
    spec = HeadSpec(draft_vocab=256, norm_before_fc=True, norm_before_residual=True, selector=case == "selector")
    live = engine(Settings(*write_pair(tmp_path, spec), k=3, speculative=method))
    from triton.runtime.interpreter import GridExecutor
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from peagle_vllm.v2 import speculator

    drafter, host, graph, steps = live.drafter, Operations(is_work), Operations(is_forbidden), []
    propose, execute = host.within(drafter.propose), host.within(GridExecutor.__call__, on=False)

    def counted_propose(*args: Any, **kwargs: Any) -> Any:
        host.calls.clear()
        replays = seen.replayed.total()
        drafts = propose(*args, **kwargs)
        steps.append((seen.replayed.total() - replays, dict(+host.calls)))
        return drafts

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        host.calls[self.fn.__name__] += host.on
        return execute(self, *args, **kwargs)

    # The emulated graph's own operations, and what ``emulate`` adds around ``prepare_inputs``, do not count.
    with (
        patch.object(speculator, "prepare_inputs", host.within(speculator.prepare_inputs)),
        emulate(live, [4]) as seen,
        patch.object(speculator, "prepare_inputs", host.within(speculator.prepare_inputs, on=False)),
        patch.object(CudaGraphManager, "run_fullgraph", host.within(CudaGraphManager.run_fullgraph, on=False)),
        patch.object(GridExecutor, "__call__", launch),
        patch.object(drafter, "propose", counted_propose),
        patch.object(drafter, "_draft", graph.within(drafter._draft)),
        patch.object(drafter, "_forward", graph.within(drafter._forward, on=False)),
        host,
        graph,
    ):
        live.run([Request(f"{case}.{i}", prompt(5, i), 9) for i in range(4)])
    replayed = [calls for replays, calls in steps if replays == 1]
    assert len(replayed) > 2
    assert all(calls == {"_prepare_inputs_kernel": 1} for calls in replayed), replayed
    assert any(len(calls) > 5 for replays, calls in steps if not replays), "a prefill's step has operations"
    assert not graph.calls
    x = torch.tensor([1.0, -1.0])
    for forbidden in (lambda: x[x > 0], lambda: x.sum().item(), lambda: x.copy_(torch.tensor([1.0, 2.0])), x.nonzero):
        with (watch := Operations(is_forbidden)):
            watch.within(forbidden)()
        assert watch.calls
