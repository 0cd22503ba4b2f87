"""benchmarks/compare_heads.py and tiny_heads.py: prompts, the losses that speculators has not, and the table."""

import json
from pathlib import Path

import pytest
import torch
from speculators.losses import resolve_loss_config

from benchmarks import compare_heads
from benchmarks.compare_heads import ARMS, BASE, KS, SEEDS
from benchmarks.tiny_heads import GAMMA, MODELS, PROMPTS, TOP, Arm, loss_of, write_prompts
from peagle_tools.train import head

ROWS, VOCAB = 6, 2 * TOP


@pytest.mark.parametrize("arm", [Arm(weighted=True), Arm(top=True)], ids=["weighted by depth", "likeliest tokens"])
def test_losses_are_those_that_the_table_names(arm: Arm) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = (torch.randn(1, ROWS, VOCAB, generator=generator) for _ in range(2))
    depth = torch.tensor([0, 1, 2, 0, 1, 2])
    anchor = torch.tensor([1, 1, 1, 2, 2, 2])
    with loss_of(arm):
        losses = resolve_loss_config("kl_div", "eager")
        loss, metrics = head.compute_metrics(logits, targets, torch.ones(1, 8), anchor, depth, 3, losses)
    said = targets.softmax(-1)
    if arm.top:
        kept = said >= said.topk(TOP).values[..., -1:]
        said = said * kept / (said * kept).sum(-1, keepdim=True)
    of_rows = (torch.xlogy(said, said) - said * logits.log_softmax(-1)).sum(-1)
    wanted = (of_rows * GAMMA**depth if arm.weighted else of_rows).mean()
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=0)
    assert metrics["full_acc_sum"] == (logits.argmax(-1) == targets.argmax(-1)).sum()


def test_no_head_learns_from_a_prompt_that_it_is_measured_on(tmp_path: Path) -> None:
    learned = {json.loads(line)["text"] for line in write_prompts(tmp_path, 4000).read_text().splitlines()}
    held_out = {json.loads(line)["prompt"] for line in (MODELS / "prompts/heldout.jsonl").read_text().splitlines()}
    assert len(learned) > 3900 and len(held_out) >= 2 * PROMPTS and not learned & held_out


def test_differences_are_those_of_the_same_seeds_and_prompts() -> None:
    def row(way: str, seed: int, *groups: float) -> dict:
        return {"target": "tiny-llama", "way": way, "seed": seed, "al": {str(k): groups for k in KS}}

    other = list(ARMS)[-1]
    found = [row(BASE, 0, 2.0, 3.0, 4.0), row(BASE, 1, 9.0, 9.0, 9.0), row(other, 0, 2.5, 3.5, 4.5)]
    columns, rows, notes = compare_heads.published({"rows": found, "steps": 5})
    assert len(columns) == 1 + len(SEEDS) * len(KS)
    assert rows[0][:2] == (BASE, "6.00 ± 0.29")  # of both seeds
    assert rows[1][:2] == (other, "3.50 (+0.50 ± 0.00)")  # to the same seed alone
    assert "5 steps" in notes
