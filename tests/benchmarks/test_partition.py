"""benchmarks/partition.py: its three ways are one step, and each is measured."""

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


def test_each_way_is_measured() -> None:
    cells = [partition.measure(arm, 512, 4, "COD", chunk_rows=128) for arm in partition.STEPS]
    assert [cell["arm"] for cell in cells] == list(partition.STEPS)
    assert all(cell["peak_mb"] > 0 and cell["seconds"] > 0 for cell in cells)
