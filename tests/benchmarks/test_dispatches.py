"""What a draft step asks of the host stays small: counted on CPU in live engines."""

import pytest

from benchmarks import arms, dispatches

PLUGIN = [name for name in dispatches.ARMS if name.startswith("plugin")]


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_operations_of_a_draft_step(runner):
    names = [name for name in PLUGIN if runner in name]
    for result in arms.run("benchmarks.dispatches", ["--here", *names], dispatches.ARMS[names[0]][1]):
        totals = result["totals"]
        assert not [op for op in result["operations"] if "item" in op or "_local_scalar_dense" in op]
        if runner == "V1":
            assert totals["operations"] <= 15, result
            continue
        assert totals["operations"] <= 8, result
        assert result["launches"] == {"_prepare_inputs_kernel": 1, "_gather_hidden_kernel": 1}
        assert totals["host_to_device"] == 0


def test_every_vocabulary_of_both_runners_is_counted():
    assert sorted(PLUGIN) == sorted(f"plugin {v}{r}" for v in ("V1", "V2") for r in ("", ", reduced vocabulary"))
