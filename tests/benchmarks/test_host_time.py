"""Host time of a draft step: both drafters replay all that they have graphs for. No speed."""

from tests.benchmarks.running import is_summary, run_script


def test_runs_on_tiny_models(tmp_path):
    printed, result = run_script("host_time", tmp_path / "host_time.json", "--batch", "2", "--rounds", "3")
    (cell,) = result["cells"]
    assert "P-EAGLE, us" in printed
    assert set(cell["us"]) == {"P-EAGLE", "EAGLE-3", "EAGLE-3, computed"}
    assert all(is_summary(times, 3) for times in cell["us"].values())
    assert cell["replays"] == {"P-EAGLE": 1, "EAGLE-3": 2}  # EAGLE-3's first step, and its K-1 others
    assert cell["ratio"] == cell["us"]["P-EAGLE"]["median"] / cell["us"]["EAGLE-3"]["median"]
    assert cell["met"] == (cell["ratio"] <= cell["aim"])
