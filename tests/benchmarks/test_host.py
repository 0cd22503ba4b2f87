"""What a draft step costs the host stays small: counted on CPU in live engines."""

import json

import pytest

from benchmarks import arms, host
from tests.benchmarks.running import PROVENANCE, ROOT, is_summary

PLUGIN = [name for name in host.ARMS if name.startswith("plugin")]
MORE_KERNELS = {
    "plugin V2, sharpened": ["_select_candidates_kernel"],
    "plugin V2, probabilistic": ["_limit_logits_kernel", "_gumbel_sample_kernel"],
}
RESULT = ROOT / "benchmarks/results/host.json"


def committed() -> dict[str, dict]:
    return {arm["arm"]: arm for arm in json.loads(RESULT.read_text())["arms"]}


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_operations_of_a_draft_step(runner):
    """No more than the committed counts, which docs/performance.md shows."""
    names = [name for name in PLUGIN if runner in name]
    for result in arms.run(host.count_arms, host.ARMS[names[0]][1], names=names):
        totals = result["totals"]
        assert not [op for op in result["operations"] if "item" in op or "_local_scalar_dense" in op]
        assert totals["operations"] <= committed()[result["arm"]]["totals"]["operations"], result
        kernels = ["_prepare_inputs_kernel", "_gather_hidden_kernel", *MORE_KERNELS.get(result["arm"], [])]
        assert result["launches"] == dict.fromkeys(kernels, 1)
        if runner == "V2":
            assert totals["host_to_device"] == 0
            one_launch_and_one_replay = {"operations": 0, "launches": 1, "host_to_device": 0, "replays": 1}
            assert result["replayed"]["totals"] == one_launch_and_one_replay


def test_both_drafters_replay_all_that_they_have_graphs_for():
    """And a result has the shape of the committed one."""
    result = host.measure(names=[], batches=[2], rounds=3)
    (cell,) = result["cells"]
    assert set(cell["us"]) == {"P-EAGLE", "EAGLE-3"}
    assert all(is_summary(times, 3) for times in cell["us"].values())
    assert cell["replays"] == {"P-EAGLE": 1, "EAGLE-3": 2}  # EAGLE-3's first step, and its K-1 others
    assert cell["ratio"] == cell["us"]["P-EAGLE"]["median"] / cell["us"]["EAGLE-3"]["median"]
    committed = json.loads(RESULT.read_text())
    assert set(committed) == set(result) | PROVENANCE and all(set(timed) == set(cell) for timed in committed["cells"])
