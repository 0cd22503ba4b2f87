"""What a draft step asks of the host stays small: counted on CPU in live engines."""

import pytest

from benchmarks import arms, dispatches

PLUGIN = [name for name in dispatches.ARMS if name.startswith("plugin")]


@pytest.mark.parametrize("name", PLUGIN)
def test_operations_of_a_draft_step(name):
    result = arms.run("benchmarks.dispatches", ["--arm", name], dispatches.ARMS[name][1])
    totals = result["totals"]
    assert not [op for op in result["operations"] if "item" in op or "_local_scalar_dense" in op]
    if "V2" in name:
        assert totals["operations"] <= 8
        assert result["launches"] == {"_expand_kernel": 1, "_broadcast_kernel": 1}
        assert totals["host_to_device"] == 0
    else:
        assert totals["operations"] <= 15


def test_every_vocabulary_of_both_runners_is_counted():
    assert sorted(PLUGIN) == sorted(f"plugin {v}{r}" for v in ("V1", "V2") for r in ("", ", reduced vocabulary"))
