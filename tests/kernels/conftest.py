"""Under Triton's interpreter every access of every launch is checked: it is in bounds, and in no race.

In bounds: inside a tensor that the kernel was given. A race: two programs at one address that one of them writes; or
two lanes of one program with no barrier between them, unless both write the same value. A lane stands for a thread,
which it is on a GPU where all accesses of an address have one shape and dtype.
"""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from peagle_kernels import dispatch
from tests.support.batches import INTERPRETED

BUILDER = interpreter.interpreter_builder
LOAD, STORE, BEGIN_PROGRAM = BUILDER.create_masked_load, BUILDER.create_masked_store, BUILDER.set_grid_idx

collect_ignore = ["test_aot.py"] if INTERPRETED else []  # it does not compile

if torch.cuda.is_available():  # to shrink compiles a variant an example, and after an illegal access each one fails
    settings.register_profile("gpu", phases=[Phase.explicit, Phase.generate], database=None)
    settings.load_profile("gpu")


class Accesses:
    """What the programs of one launch read and write.

    ``noted``: arrays of [address, program, barriers before it, lane, is a store, value stored], a column an element.
    """

    def __init__(self, arguments: Any):
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        self.starts = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
        self.ends = self.starts + np.array([_extent(tensor) for tensor in tensors], dtype=np.uint64)
        self.program = self.barriers = 0
        self.noted = [np.empty((6, 0))]

    def note(self, pointers: Any, mask: Any, values: Any = None) -> None:
        live = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        first = pointers.data[live].astype(np.uint64)[:, None]
        last = first + np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        inside = ((first >= self.starts) & (last <= self.ends)).any(axis=1)
        assert inside.all(), f"{'load' if values is None else 'store'} out of bounds"
        stored = 0 if values is None else np.broadcast_to(values.data, live.shape)[live]
        columns = (first[:, 0], self.program, self.barriers, np.flatnonzero(live), values is not None, stored)
        self.noted.append(np.stack(np.broadcast_arrays(*columns)).astype(float))  # addresses are below 2^53

    def load(self, pointers: Any, mask: Any, *rest: Any) -> Any:
        self.note(pointers, mask)
        return LOAD(pointers, mask, *rest)

    def store(self, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        self.note(pointers, mask, values)
        return STORE(pointers, values, mask, *rest)

    def begin_program(self, *index: int) -> None:
        self.program, self.barriers = self.program + 1, 0
        BEGIN_PROGRAM(*index)

    def pass_barrier(self) -> None:
        self.barriers += 1

    def check_races(self) -> None:
        rows = np.concatenate(self.noted, axis=1)
        rows = rows[:, np.isin(rows[0], rows[0, rows[4] > 0])]
        address, program, barriers, lane, is_store, value = rows[:, np.lexsort(rows[2::-1])]
        assert not _vary(program, address).any(), "two programs at one address, which one of them writes"
        between = (address, barriers)
        races = _vary(lane, *between) & (_vary(is_store, *between) | _vary(value, *between))
        assert not races.any(), "two lanes at one address with no barrier between, which one of them writes"


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _vary(values: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """For each run of equal keys, whether ``values`` differ in it."""
    starts = np.flatnonzero(np.any([np.diff(key, prepend=-1) != 0 for key in keys], axis=0))
    if not len(starts):
        return starts
    return np.maximum.reduceat(values, starts) != np.minimum.reduceat(values, starts)


@pytest.fixture(autouse=True)
def kernels_run(request: pytest.FixtureRequest) -> None:
    """Else a CPU runs the twins, and compares them with themselves."""
    compiled = torch.cuda.is_available() or request.path.name == "test_aot.py"
    assert compiled or dispatch.INTERPRETED, "set TRITON_INTERPRET=1"


@pytest.fixture(scope="session", autouse=True)
def accesses_are_checked() -> Iterator[None]:
    launch = interpreter.GridExecutor.__call__

    def checked(executor: Any, *args: Any, **kwargs: Any) -> None:
        accesses = Accesses((*args, *kwargs.values()))
        with patch.multiple(
            BUILDER,
            create_masked_load=accesses.load,
            create_masked_store=accesses.store,
            set_grid_idx=accesses.begin_program,
            create_barrier=accesses.pass_barrier,
        ):
            launch(executor, *args, **kwargs)
        accesses.check_races()

    with patch.object(interpreter.GridExecutor, "__call__", checked):
        yield
