"""benchmarks/partition.py: its three ways are one step, and its cells are shown."""

import torch

from benchmarks import partition
from tests.train.heads import furthest


def test_the_three_ways_have_the_same_gradients() -> None:
    gradients = {}
    for arm in partition.STEPS:
        torch.manual_seed(0)
        head = partition.new_head(in_parts=arm == "partition")
        batch = partition.new_batch(90, head)
        partition.STEPS[arm](head, batch, partition.options_of(4, "COD"))
        gradients[arm] = {name: weight.grad for name, weight in head.named_parameters() if weight.grad is not None}
    for arm in list(partition.STEPS)[1:]:
        assert furthest(gradients[arm], gradients["partition"]) < 1e-4


def test_cells_are_shown() -> None:
    cells = [partition.measure(arm, 512, 4, "COD", chunk_rows=128) for arm in partition.STEPS]
    assert [cell["arm"] for cell in cells] == list(partition.STEPS)
    for cell, line in zip(cells, partition.table(cells).splitlines()[1:], strict=True):
        assert line.startswith(cell["arm"]) and str(cell["peak_mb"]) in line
