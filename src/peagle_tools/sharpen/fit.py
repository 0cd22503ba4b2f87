"""Fit a selector to a trace, and choose its checkpoint by drafts that were kept aside."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from peagle_kernels.select_candidates import CandidateSelector
from peagle_tools.sharpen.trace import CandidateTrace

BATCH, LEAST_STEPS = 1024, 40  # drafts; steps an epoch, in smaller batches where drafts are few
LEARNING_RATE = 3e-3
EPOCHS, CHECKS_AN_EPOCH = 2, 3
POSITION_DECAY = 4.0  # a draft reaches position i less often: weight exp(-i / POSITION_DECAY)


def new_selector(trace: CandidateTrace, vocab_size: int, draft_vocab_size: int, rank: int) -> CandidateSelector:
    num_k, hidden_size = trace.ids.shape[1], trace.hidden.shape[-1]
    tables = torch.randn(vocab_size, rank) / rank**0.5, 0.02 * torch.randn(draft_vocab_size, rank)
    projection = torch.randn(rank, hidden_size) / hidden_size**0.5
    return CandidateSelector(*tables, projection, torch.ones(num_k), torch.ones(num_k), trace.ids.shape[2])


def loss_of(model: CandidateSelector, batch: CandidateTrace, draft_ids: Tensor) -> Tensor:
    """The cross-entropy of the target's next token among the candidates, where it is one of them.

    Args:
        draft_ids: [target vocabulary] draft id of each target id, or -1.
    """
    truth = draft_ids[batch.tokens[:, 1:].long().clamp(min=0)].where(batch.tokens[:, 1:] >= 0, -1)
    matches = batch.ids == truth[..., None]
    predecessors = F.embedding(batch.tokens[:, :-1].long().clamp(min=0), model.predecessor_codebook)
    assert model.hidden_projection is not None
    predecessors = predecessors * F.linear(batch.hidden.float(), model.hidden_projection)
    pair = torch.einsum("nkr,nkmr->nkm", predecessors, F.embedding(batch.ids.long(), model.successor_codebook))
    scores = model.unary_scale[:, None] * batch.logits + model.edge_scale[:, None] * pair  # after the target's token
    losses = F.cross_entropy(scores.flatten(0, 1), matches.int().argmax(-1).flatten(), reduction="none")
    weight = torch.exp(-torch.arange(truth.shape[1]) / POSITION_DECAY) * matches.any(-1)
    return (losses.view_as(weight) * weight).sum().div(weight.sum().clamp(min=1))


def as_written(selector: CandidateSelector) -> CandidateSelector:
    """A copy with its tables rounded to bfloat16."""
    copies: dict[str, Any] = {}
    for name, tensor in selector._asdict().items():
        if isinstance(tensor, Tensor):
            copies[name] = tensor.detach().to(torch.float32 if "scale" in name else torch.bfloat16, copy=True)
    return selector._replace(**copies)


def unchosen(selector: CandidateSelector, num_positions: int) -> CandidateSelector:
    """The same with the first positions at their argmax. Little data cannot harm those."""
    scale, unary = selector.edge_scale.clone(), selector.unary_scale.clone()
    scale[:num_positions], unary[:num_positions] = 0.0, 1.0
    return selector._replace(edge_scale=scale, unary_scale=unary)


def fit(
    learned: CandidateTrace, held: CandidateTrace, vocab_size: int, target_ids: Tensor, rank: int
) -> CandidateSelector:
    """The best selector on the development share: one that changes no draft, where nothing drafts longer.

    Args:
        held: the development share.
        vocab_size: of the target.
        target_ids: [draft vocabulary] target id of each draft id.
    """

    def judged(selector: CandidateSelector) -> tuple[float, CandidateSelector]:
        return float(held.accepted(selector, target_ids).double().mean()), selector

    torch.manual_seed(0)
    model = new_selector(learned, vocab_size, len(target_ids), rank)
    weights = [tensor.requires_grad_() for tensor in model if isinstance(tensor, Tensor)]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    draft_ids = torch.full((vocab_size,), -1).index_copy(0, target_ids, torch.arange(len(target_ids)))
    best = judged(unchosen(as_written(model), learned.ids.shape[1]))
    batch_size = min(BATCH, max(1, len(learned.ids) // LEAST_STEPS))
    orders = [rows for _ in range(EPOCHS) for rows in torch.randperm(len(learned.ids)).split(batch_size)]
    every = max(1, len(orders) // (EPOCHS * CHECKS_AN_EPOCH))
    for step, rows in enumerate(tqdm(orders, "fit", leave=False, disable=None), start=1):
        loss_of(model, learned.rows(rows), draft_ids).backward()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * max(0.05, 1 - step / len(orders))
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0 or step == len(orders):
            now = as_written(model)
            best = max(best, judged(now), judged(unchosen(now, 1)), key=lambda fitted: fitted[0])
    return best[1]
