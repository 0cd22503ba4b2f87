"""The engine benchmark: how it judges, and a run on tiny models."""

from dataclasses import replace
from pathlib import Path

from benchmarks import draft_step, engine, engines
from benchmarks.shapes import GPT_OSS_20B, HEADS
from tests.benchmarks.running import is_summary, run_script


def test_aims_are_judged():
    """Against EAGLE-3 at its best K."""
    speeds = {"EAGLE-3 K=3": 100.0, "EAGLE-3 K=7": 80.0, "stock P-EAGLE K=7, V1": 150.0, engine.OURS: 180.0}
    cells = [{"arm": arm, "c": 1, "tokens_per_second": {"median": speed}} for arm, speed in speeds.items()]
    found = {(r["over"], r["c"]): (r["value"], r["met"]) for r in engine.ratios(cells)}
    assert found == {("stock P-EAGLE", 1): (1.2, False), ("EAGLE-3", 1): (1.8, True)}


def test_published_lengths_fit_their_depth():
    assert all(1 <= arm.length <= arm.k + 1 for arm in engine.ARMS.values())
    assert {arm.k for arm in engine.ARMS.values()} == {0, 3, 7}


def test_arguments_for_a_gpu(monkeypatch, tmp_path):
    """Graphs for every batch size, which vLLM accepts, and synthetic acceptance: in all arms of both benchmarks."""
    from vllm.config import CompilationConfig

    monkeypatch.setattr(engines, "HAS_GPU", True)
    head = HEADS["gpt-oss-20b"]
    steps = {name: replace(arm, k=7) for name, arm in draft_step.ARMS.items()}
    for name, arm in (engine.ARMS | steps).items():
        arguments = engines.dummy_pair(arm, GPT_OSS_20B, head, [1, 64], 1024, tmp_path / name)
        compilation = CompilationConfig(**arguments["compilation_config"])
        assert {1, 64, 64 * (arm.k + 1)} <= set(compilation.cudagraph_capture_sizes)
        assert compilation.max_cudagraph_capture_size == 64 * (2 * arm.k if arm.k else 1)
        assert arguments["max_num_batched_tokens"] >= 2 * arm.k * 64
        assert ("speculative_config" in arguments) == (name != "none")
        if speculative := arguments.get("speculative_config"):
            assert speculative["synthetic_acceptance_length"] == arm.length
            assert ("parallel_drafting" in speculative) == arm.parallel
            assert Path(speculative["model"], "config.json").exists()


def test_runs_on_tiny_models(tmp_path):
    printed, result = run_script("engine", tmp_path / "engine.json", "--arms", engine.OURS, "--c", "1")
    assert result["device"].startswith("CPU")
    assert "not a GPU result" in printed
    assert {"target", "prompt", "tokens", "published_acceptance", "repeats", "llm"} <= set(result)
    assert (result["failed"], result["ratios"]) == ([], [])
    (only,) = result["cells"]
    assert (only["arm"], only["k"], only["c"]) == (engine.OURS, 7, 1)
    assert is_summary(only["tokens_per_second"], result["repeats"])
    assert only["acceptance_length"] >= 1
