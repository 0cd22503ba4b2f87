"""Draft steps and engines: their graph sizes and arguments on a GPU, and a run of each on tiny models."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import arms, draft_step, engine, engines
from benchmarks.shapes import GPT_OSS_20B, GPT_OSS_HEAD
from tests.benchmarks.running import is_summary


@pytest.mark.parametrize("k", [3, 5, 7, 10])
def test_every_arm_has_a_graph_for_its_rows(k):
    """V1 drops what rounding to whole requests lifts over the largest size: that must be none of these."""
    batches = [1, 4, 16, 64, 256]
    sizes = engines.graph_sizes(batches, k)
    rounded = {-(-size // (k + 1)) * (k + 1) for size in sizes["cudagraph_capture_sizes"]}
    assert max(rounded) == sizes["max_cudagraph_capture_size"]
    for n in batches:
        for rows in (n, n * (k + 1), n * 2 * k):
            assert any(size >= rows for size in rounded)


def test_arguments_for_a_gpu(monkeypatch, tmp_path):
    """Graphs for every batch size, which vLLM accepts, and synthetic acceptance: in all arms of both benchmarks."""
    from vllm.config import CompilationConfig

    monkeypatch.setattr(engines, "HAS_GPU", True)
    steps = {name: replace(arm, k=7) for name, arm in draft_step.ARMS.items()}
    for name, arm in (engine.ARMS | steps).items():
        assert 1 <= arm.length <= arm.k + 1
        arguments = engines.dummy_pair(arm, GPT_OSS_20B, GPT_OSS_HEAD, [1, 64], 1024, tmp_path / name)
        compilation = CompilationConfig(**arguments["compilation_config"])
        assert {1, 64, 64 * (arm.k + 1)} <= set(compilation.cudagraph_capture_sizes)
        assert compilation.max_cudagraph_capture_size == 64 * (2 * arm.k if arm.k else 1)
        assert arguments["max_num_batched_tokens"] >= 2 * arm.k * 64
        assert ("speculative_config" in arguments) == (name != "none")
        if speculative := arguments.get("speculative_config"):
            assert speculative["synthetic_acceptance_length"] == arm.length
            assert ("parallel_drafting" in speculative) == arm.parallel
            assert speculative.get("enable_adaptive_verification", False) == (name == engine.ADAPTIVE)
            assert Path(speculative["model"], "config.json").exists()


def test_cells_are_compared_with_ours_at_the_same_place():
    """What ours takes of each other one's figure; nothing where ours is not measured."""
    figures = (("stock V1", 1, 300), (draft_step.OURS, 1, 120), (draft_step.OURS, 64, 270), ("EAGLE-3 V2", 64, 540))
    cells = [{"arm": arm, "k": 7, "batch": batch, "device_us": {"median": us}} for arm, batch, us in figures]
    found = arms.compared([*cells, cells[0] | {"k": 5}], draft_step.OURS, ("k", "batch"), "device_us")
    assert [cell.get(f"{draft_step.OURS} / it") for cell in found] == [0.4, 1.0, 1.0, 0.5, None]


def test_runs_on_tiny_models():
    env = draft_step.ARMS["plugin V1"].env
    (step,) = arms.run(draft_step.run_arm, env, arm="plugin V1", k=3, batches=[2])
    assert (step["arm"], step["k"], step["batch"]) == ("plugin V1", 3, 2) and step["/ roofline"] > 0
    assert all(is_summary(step[column], draft_step.REPEATS) for column in ("device_us", "host_us"))
    assert "plugin V1" in draft_step.page([step])
    (served,) = arms.run(engine.run_arm, engine.ARMS[engine.OURS].env, arm=engine.OURS, batches=[1])
    assert (served["arm"], served["k"], served["c"]) == (engine.OURS, 7, 1) and served["acceptance_length"] >= 1
    assert is_summary(served["tokens_per_second"], engine.REPEATS)
    assert engine.OURS in engine.page([served])
