"""The bounds: by hand, and how one step differs from another."""

import json

import pytest

from benchmarks.roofline import DEVICES, Device, Part, Roofline, draft_step_roofline, variants
from benchmarks.shapes import PUBLISHED, Head, Model
from tests.benchmarks.running import ROOT, run_script

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


@pytest.mark.parametrize(("k", "batch", "rank"), [(3, 1, 64), (7, 64, 256)])
def test_sharpened_is_plain_and_the_selector(k: int, batch: int, rank: int):
    head, drafts = PUBLISHED["qwen3-8b"][0], k * batch
    plain, sharpened = (draft_step_roofline(head, k, batch, rank=width) for width in (0, rank))
    tables = drafts * (rank + 16 * rank) * 2  # one predecessor row and 16 successor rows, bfloat16
    projection, gates = rank * head.target.hidden * 2, 2 * drafts * rank * 2
    candidates = 2 * drafts * 16 * (8 + 4) + drafts * 16 * 4  # id and logit written and read, score written
    assert moved(sharpened) == moved(plain) | {"selector": tables + projection + gates + candidates}


def test_fp8_halves_layers_and_lm_head_and_their_arithmetic():
    head = PUBLISHED["gpt-oss-20b"][0]
    plain, fp8 = (draft_step_roofline(head, 7, 64, weight_bytes=n) for n in (2, 1))
    halved = {name for name in plain.parts if moved(fp8)[name] == moved(plain)[name] / 2}
    assert halved == {"layers", "lm_head"}
    device = Device(1e12, 1e12)
    matrices = sum(computed(plain)[name] for name in halved)
    assert plain.seconds(device)[1] - fp8.seconds(device)[1] == pytest.approx(matrices / 2 / 1e12)


def test_eagle3_reads_its_layer_and_lm_head_for_every_draft():
    bounds = [draft_step_roofline(SMALL, k, 1, parallel=False) for k in (1, 7)]
    one, seven = map(moved, bounds)
    assert {name for name in one if seven[name] == 7 * one[name]} == {"layers", "lm_head", "attention", "logits"}
    assert seven["fc"] == one["fc"]
    assert one["layers"] == 2 * (4 * 2 * 8 + 4 * 4 + 3 * 4 * 8)


def test_a_bound_is_the_larger_of_moving_and_computing():
    bound = Roofline({"a": Part(6.0, 8.0), "b": Part(4.0, 8.0, 2)})
    assert bound.seconds(Device(bandwidth=5.0, flops=4.0)) == (2.0, 3.0)


def test_a_run_and_the_committed_result(tmp_path):
    printed, result = run_script("roofline", tmp_path / "roofline.json")
    committed = json.loads((ROOT / "benchmarks/results/roofline.json").read_text())
    for part in ("what", "assumptions", "sizes", "devices", "cells"):
        assert result[part] == committed[part], part
    assert "Computed, not measured" in printed
    assert all(assumed in printed for assumed in (*result["assumptions"].values(), *result["sizes"].values()))
    steps = {(cell["head"], cell["k"], cell["batch"]): set() for cell in result["cells"]}
    assert set(steps) == {(name, k, batch) for name in PUBLISHED for k in (3, 5, 7) for batch in (1, 64)}
    for cell in result["cells"]:
        steps[cell["head"], cell["k"], cell["batch"]].add(cell["step"])
    for (name, *_), found in steps.items():
        assert found == set(variants(PUBLISHED[name][0]))
        assert ("32,000 tokens" in found) == (name != "qwen3-8b")  # which has no more to begin with


def test_what_the_page_says_of_the_bounds():
    """docs/performance.md: arithmetic binds the whole vocabulary at 64 requests; a trimmed EAGLE-3 head reads less."""
    head = PUBLISHED["gpt-oss-20b"][0]
    moving, computing = draft_step_roofline(head, 7, 64).seconds(DEVICES["H200"])
    assert computing == pytest.approx(1789e-6, abs=5e-7) and computing > moving
    eagle3 = draft_step_roofline(head, 3, 1, parallel=False, draft_vocab=32_000)
    assert max(eagle3.seconds(DEVICES["H200"])) < max(draft_step_roofline(head, 3, 1).seconds(DEVICES["H200"]))
