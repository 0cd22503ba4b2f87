"""What a draft step costs the host stays small: counted on CPU in live engines."""

import json

import pytest

from benchmarks import arms, host
from tests.benchmarks.running import ROOT

PLUGIN = [name for name in host.ARMS if name.startswith("plugin")]
MORE_KERNELS = {
    "plugin V2, sharpened": ["_select_candidates_kernel"],
    "plugin V2, probabilistic": ["_select_candidates_kernel"],
}
RESULT = ROOT / "benchmarks/results/host.json"


def committed() -> dict[str, dict]:
    return {arm["arm"]: arm for arm in json.loads(RESULT.read_text())["arms"]}


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_operations_of_a_draft_step(runner):
    """No more than the committed counts."""
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


def test_stock_vllm_starts():
    """It has no look-up to turn off. (The counts of stock arms are measured, not tested.)"""
    stock = "stock V1"
    (result,) = arms.run(host.count_arms, host.ARMS[stock][1], names=[stock])
    assert result["totals"]["launches"] == 0
