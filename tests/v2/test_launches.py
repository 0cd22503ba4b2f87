"""What the host does in a draft step of a decode batch: one launch and one graph replay."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.engines import Request, Settings, engine
from tests.support.graphs import emulate
from tests.support.random_heads import HeadSpec, prompt, write_pair

pytestmark = [pytest.mark.arm("plugin-v2"), pytest.mark.kernels]
ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")


class Counting(TorchDispatchMode):
    """Counts, while ``on``, what a GPU's host would launch or copy: views and allocations are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.calls = False, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        from_host = name == "aten::lift_fresh"
        self.calls[name] += self.on and (from_host or not is_view) and name not in ALLOCATIONS
        return func(*args, **(kwargs or {}))

    @contextmanager
    def switched(self, on: bool) -> Iterator[bool]:
        before, self.on = self.on, on
        try:
            yield before
        finally:
            self.on = before

    def within(self, function: Callable[..., Any], on: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.switched(on):
                return function(*args, **kwargs)

        return call


@pytest.mark.parametrize("case", ["greedy", "selector", "probabilistic"])
def test_a_decode_step_is_one_launch_and_one_replay(case: str, tmp_path: Path) -> None:
    """The emulated graph's own operations, and what ``emulate`` adds around ``prepare_inputs``, do not count."""
    method = (("draft_sample_method", "probabilistic"),) if case == "probabilistic" else ()
    live = engine(Settings(*write_pair(tmp_path, HeadSpec(selector=case == "selector")), k=3, speculative=method))
    from triton.runtime.interpreter import GridExecutor
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from peagle_vllm.v2 import speculator

    counting, steps = Counting(), []
    propose, execute = live.drafter.propose, GridExecutor.__call__

    def counted_propose(*args: Any, **kwargs: Any) -> Any:
        counting.calls.clear()
        replays = seen.replayed.total()
        with counting, counting.switched(True):
            drafts = propose(*args, **kwargs)
        steps.append((seen.replayed.total() - replays, dict(+counting.calls)))
        return drafts

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        with counting.switched(False) as on:
            counting.calls[self.fn.__name__] += on
            return execute(self, *args, **kwargs)

    with (
        patch.object(speculator, "prepare_inputs", counting.within(speculator.prepare_inputs, True)),
        emulate(live, [4]) as seen,
        patch.object(speculator, "prepare_inputs", counting.within(speculator.prepare_inputs, False)),
        patch.object(CudaGraphManager, "run_fullgraph", counting.within(CudaGraphManager.run_fullgraph, False)),
        patch.object(GridExecutor, "__call__", launch),
        patch.object(live.drafter, "propose", counted_propose),
    ):
        live.run([Request(f"{case}.{i}", prompt(5, i), 9) for i in range(4)])
    replayed = [calls for replays, calls in steps if replays == 1]
    assert len(replayed) > 2
    assert all(calls == {"_prepare_inputs_kernel": 1} for calls in replayed), replayed
    assert any(len(calls) > 5 for replays, calls in steps if not replays), "a prefill's step has operations"
