"""Engines: their graph sizes and arguments on a GPU. rung1's rehearsal runs them on tiny models."""

from pathlib import Path

import pytest

from benchmarks import arms, engine


@pytest.mark.parametrize("k", [3, 5, 7, 10])
def test_every_arm_has_a_graph_for_its_rows(k):
    """V1 drops what rounding to whole requests lifts over the largest size: that must be none of these."""
    batches = [1, 4, 16, 64, 256]
    sizes = engine.graph_sizes(batches, k)
    rounded = {-(-size // (k + 1)) * (k + 1) for size in sizes["cudagraph_capture_sizes"]}
    assert max(rounded) == sizes["max_cudagraph_capture_size"]
    for n in batches:
        for rows in (n, n * (k + 1), n * 2 * k):
            assert any(size >= rows for size in rounded)


def test_arguments_for_a_gpu(monkeypatch, tmp_path):
    """Graphs for every batch size, which vLLM accepts, and synthetic acceptance."""
    from vllm.config import CompilationConfig

    monkeypatch.setattr(engine, "HAS_GPU", True)
    for name, arm in engine.ARMS.items():
        assert 1 <= arm.length <= arm.k + 1
        arguments = engine.dummy_pair(arm, [1, 64], tmp_path / name)
        compilation = CompilationConfig(**arguments["compilation_config"])
        assert compilation.max_cudagraph_capture_size == 64 * (2 * arm.k if arm.k else 1)
        assert arguments["max_num_batched_tokens"] >= 2 * arm.k * 64
        assert ("speculative_config" in arguments) == (name != engine.NONE)
        if speculative := arguments.get("speculative_config"):
            assert speculative["synthetic_acceptance_length"] == arm.length
            assert ("parallel_drafting" in speculative) == arm.parallel
            has_lookup = arm.parallel and "PEAGLE_VLLM_DISABLE" not in arm.env
            assert speculative.get("prompt_lookup_min") == (0 if has_lookup else None)
            assert Path(speculative["model"], "config.json").exists()


def test_cells_are_compared_with_ours_at_the_same_place():
    """What ours takes of each other one's figure; nothing where ours is not measured."""
    figures = ((engine.STOCK_PEAGLE, 1, 300), (engine.OURS, 1, 120), (engine.OURS, 64, 270), (engine.EAGLE3, 64, 540))
    cells = [{"arm": arm, "k": 7, "c": c, "device_us": {"median": us}} for arm, c, us in figures]
    compared = arms.compared([*cells, cells[0] | {"k": 5}], engine.OURS, ("k", "c"), "device_us")
    assert [cell.get(f"{engine.OURS} / it") for cell in compared] == [0.4, 1.0, 1.0, 0.5, None]
