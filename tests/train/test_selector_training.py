"""A candidate selector trained with its head: the step, and its optimizer."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from speculators.models.peagle.data import generate_cod_sample_indices
from torch import Tensor

from peagle_tools.train import selector_training as module
from peagle_tools.train.selector_training import new_selector
from tests.train.heads import DRAFT_VOCAB, LOSS, VOCAB, Shape, batch, furthest, pair, step
from tests.train.runs import new_trainer, toy_run

RANK, CANDIDATES = 4, 8


def whole_step(
    flat: torch.nn.Module, selector: Any, draft_ids: list[int], given: dict[str, Tensor], options: dict[str, Any]
) -> tuple[dict, dict, dict]:
    """Losses and gradients of a step as the formula says: speculators' flat step, and the rows one by one."""
    seen: dict[str, Tensor] = {}
    hook = flat.lm_head.register_forward_hook(lambda _, ins, out: seen.update(hidden=ins[0][0], logits=out[0]))
    torch.manual_seed(0)
    loss = flat(**given, **options)[1]
    hook.remove()
    torch.manual_seed(0)
    ids, documents = given["input_ids"][0].tolist(), given["document_ids"][0].tolist()
    ratios = (options[name] for name in ("num_depths", "down_sample_ratio", "down_sample_ratio_min"))
    anchor, depth = generate_cod_sample_indices(len(ids), given["loss_mask"], *ratios)
    losses = []
    for row, at in enumerate((anchor + depth).tolist()):
        has_next = documents[at : at + 2] == [documents[at]] * 2
        if not (given["loss_mask"][0, at] and has_next and ids[at + 1] in draft_ids):
            continue
        truth, logits = draft_ids.index(ids[at + 1]), seen["logits"][row]
        candidates = logits.topk(CANDIDATES).indices.tolist()
        candidates = candidates if truth in candidates else [*candidates[:-1], truth]
        context = selector.predecessor_codebook[ids[at]] * (selector.hidden_projection.weight @ seen["hidden"][row])
        scores = logits[candidates] + selector.successor_codebook[candidates] @ context
        losses.append(-scores.log_softmax(0)[candidates.index(truth)])
    selector_loss = torch.stack(losses).mean()
    (loss + selector_loss).backward()
    gradients = {name: weight.grad for name, weight in flat.named_parameters() if weight.requires_grad}
    gradients |= {f"candidate_selector.{name}": weight.grad for name, weight in selector.named_parameters()}
    return {"loss": (loss + selector_loss).detach()}, {"selector_loss_sum": selector_loss.detach()}, gradients


@pytest.mark.parametrize(
    ("chunk_rows", "draft_vocab", "ratio"), [*product((1, 7, 999), (DRAFT_VOCAB, VOCAB), ((1.0, 1.0), (0.7, 0.2)))]
)
def test_a_step_in_parts_is_the_whole_formula(
    chunk_rows: int, draft_vocab: int, ratio: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and the gradient of every weight, in float64, of two documents and padding."""
    monkeypatch.setattr(module, "NUM_CANDIDATES", CANDIDATES)
    flat, parts = pair.__wrapped__(Shape(norms="fc_norm", dtype=torch.float64, draft_vocab=draft_vocab))
    draft_ids = [token for token in range(VOCAB) if draft_vocab == VOCAB or token % 6]
    if parts.t2d is not None:
        parts.t2d[draft_ids] = True
    selectors = []
    for _ in range(2):
        torch.manual_seed(5)
        selectors.append(new_selector(parts, RANK, None).double())
        torch.nn.init.normal_(selectors[-1].predecessor_codebook)
    parts.candidate_selector = selectors[1]
    torch.manual_seed(6)
    supervised = [*range(2, 9), *range(13, 17), *range(19, 23)]
    given = batch([9, 2, 12], supervised, torch.float64, padding=3)
    options = {"num_depths": 4, "down_sample_ratio": ratio[0], "down_sample_ratio_min": ratio[1]}
    options["loss_config"] = LOSS
    wanted = whole_step(flat, selectors[0], draft_ids, given, options)
    actual = step(parts, given, 0, **options, chunk_rows=chunk_rows)
    assert furthest(actual[0], wanted[0]) < 1e-10 and furthest(actual[2], wanted[2]) < 1e-10
    name = "selector_loss_sum"
    assert float(actual[1][name]) == pytest.approx(float(wanted[1][name]), rel=1e-12)


def test_a_step_without_a_token_to_choose_has_no_selector_loss() -> None:
    """Its head learns; the selector's gradients are zero, and there: other processes wait for them."""
    _, parts = pair.__wrapped__(Shape())
    parts.candidate_selector = new_selector(parts, RANK, None)  # no token can be drafted
    given = batch([12], [*range(3, 12)], torch.float32)
    metrics, gradients = step(parts, given, 0, num_depths=3, loss_config=LOSS)[1:]
    assert metrics["selector_loss_sum"] == 0 and gradients["fc.weight"].any()
    assert not any(gradients[f"candidate_selector.{name}"].any() for name in parts.candidate_selector.state_dict())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_new_selector_has_its_own_rate_and_no_weight_decay(tmp_path: Path, name: str) -> None:
    trainer = new_trainer(toy_run(tmp_path / "run", selector={"rank": RANK}, optimizer={"name": name}))
    selector = trainer.head.candidate_selector  # whose successors are not 0: else neither would ever get a gradient
    assert selector.successor_codebook.all() and not selector.predecessor_codebook.any()  # no draft is changed yet
    wanted = {f"candidate_selector.{part}" for part in selector.state_dict()}
    *others, group = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    assert isinstance(trainer.optimizers[-1], torch.optim.AdamW)
    assert set(group["param_names"]) == wanted and group["weight_decay"] == 0 and group["initial_lr"] == 0.003
    assert all(group["weight_decay"] > 0 and group["initial_lr"] != 0.003 for group in others)
    without = new_trainer(toy_run(tmp_path / "without", optimizer={"name": name}))
    assert len(without.optimizers[-1].param_groups) == 1
