"""The bounds: by hand, and as committed."""

import json
import subprocess
import sys

import pytest

from benchmarks.roofline import DEVICES, draft_step_roofline, seconds
from benchmarks.shapes import PUBLISHED, HeadShape, Model
from tests.benchmarks.running import ROOT

# Hidden 4, two query heads and one KV head of 2, MLP 8 wide, 10 of 20 tokens, 3 hidden states.
SMALL = HeadShape(Model(4, 4, 2, 1, 2, 8, 20), intermediate=8, draft_vocab=10)


def test_small_head_by_hand():
    """Two requests, three drafts each, five tokens of context."""
    bound = draft_step_roofline(SMALL, 3, 2, context=5)
    attention = 4 * 4 + 2 * 4 * 2 + 4 * 4  # q, k and v, o; the first layer's q, k and v are twice as wide
    layers = (attention + 4 * 4 + 2 * 4 * 2) + 3 * attention + 4 * (3 * 4 * 8)
    assert {name: part.bytes for name, part in bound.items()} == {
        "fc": 2 * 12 * 4,
        "layers": 2 * layers,
        "lm_head": 2 * 10 * 4,
        "hidden states": 2 * (2 * 4 * 12 + 2 * 6 * 4),  # K+1 rows of fc, 2K rows of the layers
        "attention": 4 * 2 * 5 * (2 + 2) * 2,  # layers, requests, tokens, a key and a value of one head, 2 bytes
        "logits": 2 * 2 * (2 * 3) * 10,
    }
    assert {name: part.flops for name, part in bound.items() if part.flops} == {
        "fc": 2 * 2 * 4 * 48,
        "layers": 2 * 12 * layers,
        "lm_head": 2 * 6 * 40,
        "attention": 4 * 2 * 6 * 5 * 2 * (2 + 2) * 2,  # layers, requests, rows, tokens, heads, two products of 2
    }


def test_a_run_and_the_committed_result(tmp_path):
    out = tmp_path / "roofline.json"
    command = [sys.executable, "-m", "benchmarks.roofline", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    printed, result = done.stdout, json.loads(out.read_text())
    assert set(result) >= {"what", "device", "hardware", "versions", "commit"}
    committed = json.loads((ROOT / "benchmarks/results/roofline.json").read_text())
    for part in ("what", "assumptions", "sizes", "devices", "cells"):
        assert result[part] == committed[part], part
    assert "Computed, not measured" in printed
    assert all(assumed in printed for assumed in (*result["assumptions"].values(), *result["sizes"].values()))


def test_what_the_page_says_of_the_bounds():
    """docs/performance.md: arithmetic binds the whole vocabulary at 64 requests; a trimmed EAGLE-3 head reads less."""
    head = PUBLISHED["gpt-oss-20b"][0]
    moving, computing = seconds(draft_step_roofline(head, 7, 64), DEVICES["H200"])
    assert computing == pytest.approx(1789e-6, abs=5e-7) and computing > moving
    eagle3 = draft_step_roofline(head, 3, 1, parallel=False, draft_vocab=32_000)
    bounds = [max(seconds(step, DEVICES["H200"])) for step in (eagle3, draft_step_roofline(head, 3, 1))]
    assert bounds[0] < bounds[1]
