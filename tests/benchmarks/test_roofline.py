"""The bounds: by hand, against published parameter counts, and how one step differs from another."""

import itertools
import json

import pytest

from benchmarks.roofline import (
    CONTEXT,
    DEVICES,
    Device,
    Part,
    Roofline,
    Selector,
    draft_step_roofline,
    published,
    target_step_roofline,
    variants,
)
from benchmarks.shapes import PUBLISHED, Head, Model, Target
from tests.benchmarks.running import ROOT, run_script

NAMES = sorted(PUBLISHED)
# Hidden 4, two query heads and one KV head of 2, MLP 8 wide, 10 of 20 tokens, 3 hidden states.
SMALL = Head("x", Model(4, 4, 2, 1, 2, 8, 20), intermediate=8, draft_vocab=10)


def moved(bound: Roofline) -> dict[str, float]:
    return {name: part.bytes for name, part in bound.parts.items()}


def computed(bound: Roofline) -> dict[str, float]:
    return {name: part.flops for name, part in bound.parts.items() if part.flops}


def test_small_head_by_hand():
    """Two requests, three drafts each, five tokens of context."""
    bound = draft_step_roofline(SMALL, 3, 2, context=5)
    attention = 4 * 4 + 2 * 4 * 2 + 4 * 4  # q, k and v, o; the first layer's q, k and v are twice as wide
    layers = (attention + 4 * 4 + 2 * 4 * 2) + 3 * attention + 4 * (3 * 4 * 8)
    assert moved(bound) == {
        "fc": 2 * 12 * 4,
        "layers": 2 * layers,
        "lm_head": 2 * 10 * 4,
        "hidden states": 2 * (2 * 4 * 12 + 2 * 6 * 4),  # K+1 rows of fc, 2K rows of the layers
        "attention": 4 * 2 * 5 * (2 + 2) * 2,  # layers, requests, tokens, a key and a value of one head, 2 bytes
        "logits": 2 * 2 * (2 * 3) * 10,
    }
    assert computed(bound) == {
        "fc": 2 * 2 * 4 * 48,
        "layers": 2 * 12 * layers,
        "lm_head": 2 * 6 * 40,
        "attention": 4 * 2 * 6 * 5 * 2 * (2 + 2) * 2,  # layers, requests, rows, tokens, heads, two products of 2
    }


def test_gpt_oss_head_by_hand():
    """One request, seven drafts: the published 3.6 GB of weights but for the embedding, and little else."""
    bound = draft_step_roofline(PUBLISHED["gpt-oss-20b"][0], 7, 1)
    first, later = 2 * 2880 * (4096 + 512 + 512), 2880 * (4096 + 512 + 512)
    layers = first + 3 * later + 4 * (4096 * 2880 + 3 * 2880 * 14336)
    fc, lm_head = 8640 * 2880, 201_088 * 2880
    assert layers + fc + 2 * lm_head == pytest.approx(1.8e9, rel=0.01)  # with the embedding: its card's parameters
    hidden, keys_values, logits = (3 * 8 + 2 * 7) * 2880, 4 * 2048 * 2 * 512, 2 * 7 * 201_088
    assert bound.bytes == 2 * (fc + layers + lm_head + hidden + keys_values + logits)
    assert 2.44e9 < bound.bytes < 2.47e9


def test_every_hidden_state_is_read_by_fc():
    assert moved(draft_step_roofline(PUBLISHED["qwen3-8b"][0], 3, 1))["fc"] == 2 * (5 * 4096) * 4096


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_fewer_tokens_move_and_compute_less(name: str, parallel: bool):
    head = PUBLISHED[name][0]
    bounds = [draft_step_roofline(head, 7, 64, parallel=parallel, draft_vocab=n) for n in (1, 1000, 16_000, 32_000)]
    bounds.append(draft_step_roofline(head, 7, 64, parallel=parallel, draft_vocab=head.target.vocab))
    for less, more in itertools.pairwise(bounds):
        assert less.bytes < more.bytes
        assert less.flops < more.flops
        assert all(max(less.seconds(device)) <= max(more.seconds(device)) for device in DEVICES.values())


@pytest.mark.parametrize("wrong", [0, -1, 201_089])
def test_a_vocabulary_that_cannot_be(wrong: int):
    with pytest.raises(ValueError, match=rf"^draft vocabulary of {wrong}: must be 1 to 201088, the target's own$"):
        draft_step_roofline(PUBLISHED["gpt-oss-20b"][0], 3, 1, draft_vocab=wrong)


@pytest.mark.parametrize(("k", "batch", "rank"), [(3, 1, 64), (7, 64, 256)])
@pytest.mark.parametrize("name", NAMES)
def test_sharpened_is_plain_and_the_edge(name: str, k: int, batch: int, rank: int):
    head = PUBLISHED[name][0]
    plain, sharpened = (draft_step_roofline(head, k, batch, selector=selector) for selector in (None, Selector(rank)))
    drafts = k * batch
    tables = drafts * (rank + 16 * rank) * 2  # one predecessor row and 16 successor rows, bfloat16
    projection, gates = rank * head.target.hidden * 2, 2 * drafts * rank * 2
    candidates = 2 * drafts * 16 * (8 + 4) + drafts * 16 * 4  # id and logit written and read, score written
    assert sharpened.bytes - plain.bytes == tables + projection + gates + candidates
    assert {**moved(plain), "selector": moved(sharpened)["selector"]} == moved(sharpened)
    assert (sharpened.bytes - plain.bytes) / plain.bytes < 0.003


def test_fp8_halves_layers_and_lm_head_and_their_arithmetic():
    head = PUBLISHED["gpt-oss-20b"][0]
    plain, fp8 = (draft_step_roofline(head, 7, 64, weight_bytes=n) for n in (2, 1))
    halved = {name for name in plain.parts if moved(fp8)[name] == moved(plain)[name] / 2}
    assert halved == {"layers", "lm_head"}
    assert fp8.flops == plain.flops
    device = Device(1e12, 1e12)
    matrices = sum(computed(plain)[name] for name in halved)
    assert plain.seconds(device)[1] - fp8.seconds(device)[1] == pytest.approx(matrices / 2 / 1e12)


def test_eagle3_reads_its_layer_and_lm_head_for_every_draft():
    bounds = [draft_step_roofline(SMALL, k, 1, parallel=False) for k in (1, 7)]
    one, seven = map(moved, bounds)
    assert {name for name in one if seven[name] == 7 * one[name]} == {"layers", "lm_head", "attention", "logits"}
    assert seven["fc"] == one["fc"]
    one_flops, seven_flops = map(computed, bounds)
    assert {name for name in one_flops if seven_flops[name] == 7 * one_flops[name]} == {
        "layers",
        "lm_head",
        "attention",
    }
    first_layer = 4 * 2 * 8 + 4 * 4 + 3 * 4 * 8
    assert one["layers"] == 2 * first_layer


@pytest.mark.parametrize(
    ("name", "active", "total"), [("gpt-oss-20b", 3.61e9, 20.91e9), ("gpt-oss-120b", 5.13e9, 116.83e9)]
)
def test_targets_have_their_published_parameters(name: str, active: float, total: float):
    """OpenAI's own counts; all experts are read once so many tokens choose among them."""
    target = PUBLISHED[name][1]
    ops = computed(target_step_roofline(target, 7, 64, context=1))
    matrices = sum(ops[part] for part in ("attention matrices", "experts", "router", "lm_head"))
    assert matrices / (2 * 8 * 64) == pytest.approx(active, rel=0.005)
    weights = moved(target_step_roofline(target, 100, 1000, context=1))
    elements = weights["experts"] / (4.25 / 8)
    elements += sum(weights[part] for part in ("attention matrices", "router", "lm_head")) / 2
    assert elements + 201_088 * 2880 == pytest.approx(total, rel=0.005)


def test_target_by_hand():
    """Two of four experts, one request and one draft: 4 x (1 - (1/2)^2) experts; one of two layers sees 3 tokens."""
    model = Model(hidden=4, intermediate=6, heads=2, kv_heads=1, head_dim=2, layers=2, vocab=10)
    target = Target(model, experts=4, active=2, mlp_bytes=0.5, window=3)
    assert moved(target_step_roofline(target, 1, 1, context=5)) == {
        "attention matrices": 2 * 2 * (4 * (4 + 2 + 2) + 4 * 4),
        "experts": 0.5 * 2 * 3 * (3 * 4 * 6),
        "router": 2 * 2 * 4 * 4,
        "lm_head": 2 * 10 * 4,
        "logits": 2 * 2 * 2 * 10,
        "attention": 5 * 4 * 2,
        "windowed attention": 3 * 4 * 2,
    }


def test_a_floor_is_the_larger_of_moving_and_computing():
    bound = Roofline({"a": Part(6.0, 8.0), "b": Part(4.0, 8.0, 2)})
    assert bound.seconds(Device(bandwidth=5.0, flops=4.0)) == (2.0, 3.0)


def test_a_run_and_the_committed_result(tmp_path):
    printed, result = run_script("roofline", tmp_path / "roofline.json")
    committed = json.loads((ROOT / "benchmarks/results/roofline.json").read_text())
    for part in ("what", "assumptions", "sizes", "devices", "context", "kv_bytes", "shapes", "cells"):
        assert result[part] == committed[part], part
    assert result["context"] == CONTEXT
    assert "Computed, not measured" in printed
    for assumed in (*result["assumptions"].values(), *result["sizes"].values()):
        assert assumed in printed
    steps = {(cell["head"], cell["k"], cell["batch"]): set() for cell in result["cells"]}
    assert set(steps) == {(name, k, batch) for name in PUBLISHED for k in (3, 5, 7) for batch in (1, 64)}
    for cell in result["cells"]:
        steps[cell["head"], cell["k"], cell["batch"]].add(cell["step"])
    for (name, *_), found in steps.items():
        vocabs = [32_000, 64_000]
        assert found == {*variants(PUBLISHED[name][0], vocabs), "the target's step"}
        assert {"as published", "fp8", "edge of rank 64", "edge of rank 256", "EAGLE-3"} <= found
        assert ("32,000 tokens" in found) == (name != "qwen3-8b")  # which has no more to begin with


def test_flags_change_what_it_is_computed_for(tmp_path):
    options = ["--draft-vocab", "8000", "--device", "X:1:100", "--context", "1", "--kv-bytes", "1"]
    printed, result = run_script("roofline", tmp_path / "roofline.json", *options)
    assert "X: 1 TB/s and 100 TFLOP/s" in printed
    cell = next(c for c in result["cells"] if (c["head"], c["step"], c["k"]) == ("qwen3-8b", "8,000 tokens", 3))
    bound = draft_step_roofline(PUBLISHED["qwen3-8b"][0], 3, 1, draft_vocab=8000, context=1, kv_bytes=1)
    assert sum(cell["bytes"].values()) == bound.bytes
    assert set(cell["us"]) == {"X"}
    assert cell["us"]["X"]["moving"] == pytest.approx(bound.bytes / 1e6, abs=0.1)
    assert cell["us"]["X"]["computing"] == pytest.approx(bound.flops / 1e8, abs=0.1)


def test_a_full_batch_is_bound_by_the_rows_of_its_graph():
    bound = draft_step_roofline(PUBLISHED["gpt-oss-20b"][0], 7, 64)
    moving, computing = bound.seconds(DEVICES["H200"])
    assert computing == pytest.approx(1789e-6, abs=5e-7)
    assert computing > moving


def test_where_eagle3s_floor_is_lower_is_said():
    """Most published EAGLE-3 heads draft of 32,000 tokens."""
    us = {
        name: max(draft_step_roofline(PUBLISHED["gpt-oss-20b"][0], 3, 1, **how).seconds(DEVICES["H200"]))
        for name, how in {"P-EAGLE": {}, "EAGLE-3": {"parallel": False, "draft_vocab": 32_000}}.items()
    }
    assert us["EAGLE-3"] < us["P-EAGLE"]
    result = json.loads((ROOT / "benchmarks/results/roofline.json").read_text())
    lower = "EAGLE-3, 32,000 tokens against as published (gpt-oss-20b, B = 1, K = 3;"
    assert lower in published(result)[2]
