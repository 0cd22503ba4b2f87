"""Training steps as a GPU would run them, at tiny shapes; and what training costs, by hand."""

import pytest

from benchmarks import training, training_cost


def test_the_partition_is_as_near_as_the_flat_step() -> None:
    checks = training.parity()
    lines = training.page(checks).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"bfloat16, {arm}" for arm in training.ATTENTION]
    assert all(line.endswith(": met") for line in lines)
    assert training.page([{**checks[0], "limit": checks[0]["error"] / 2}]).endswith(": missed")


def test_a_step_is_timed() -> None:
    (cell,) = training.step("partition", 64, "all depths")
    assert cell["rows"] == sum(64 - depth for depth in range(8))
    assert f"{cell['tokens'] / cell['seconds']:,.0f}" in training.page([cell])


def test_cost_by_hand() -> None:
    """Qwen3-8B has 8.2e9 weights; the 0.6e9 of its embedding compute nothing, and attention adds a few percent."""
    found = training_cost.cost("qwen3-8b")
    assert found["bytes"] == 100e6 * 4 * 4096 * 2
    assert found["states"] == pytest.approx(1.1 * 100e6 * 2 * 7.6e9 / (0.4 * 989e12) / 3600, rel=0.1)
    first, later = 2 * 4096 * 6144, 4096 * 6144
    layers = first + 3 * later + 4 * (4096 * 4096 + 3 * 4096 * 12288)
    logits, fc, attention = 151_936 * 4096, 3 * 4096 * 4096, 4 * (2048 + 1024) * 4 * 4096
    row = 3 * (2 * layers + attention + 2 * logits) + 2 * logits
    assert training_cost.row_flops("qwen3-8b", "all depths") == pytest.approx(
        8 * row + 2 * layers + attention + 6 * fc, rel=1e-4
    )
    assert found["all depths"] / found["COD"] == pytest.approx(8 / 3.373, rel=0.1)
