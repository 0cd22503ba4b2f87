"""Fit a selector to a trace, and choose its form by drafts that were kept aside."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle_kernels import CandidateSelector
from peagle_tools.sharpen.trace import CandidateTrace, Gain

BATCH, LEAST_STEPS = 1024, 40  # drafts; steps an epoch, in smaller batches where drafts are few
LEARNING_RATE = 3e-3
EPOCHS, CHECKS_AN_EPOCH = 2, 3
FORMS = ("gated", "table")  # with and without a projection of the drafter's hidden state
OWN = "own"  # the form of a head that has a selector: that one is fitted further
POSITION_DECAY = 4.0  # a draft reaches position i less often: weight exp(-i / POSITION_DECAY)


@dataclass(frozen=True)
class Fitted:
    """A selector, and its acceptance length on the development share at the largest K."""

    form: str  # of FORMS, or OWN
    selector: CandidateSelector
    gain: Gain


def new_selector(form: str, trace: CandidateTrace, sizes: tuple[int, int], rank: int) -> CandidateSelector:
    """Where fitting begins for one of FORMS; ``sizes``: target vocabulary, draft vocabulary."""
    num_k, hidden_size = trace.ids.shape[1], trace.hidden.shape[-1]
    tables = torch.randn(sizes[0], rank) / rank**0.5, 0.02 * torch.randn(sizes[1], rank)
    projection = torch.randn(rank, hidden_size) / hidden_size**0.5 if form == "gated" else None
    return CandidateSelector(*tables, projection, torch.ones(num_k), torch.ones(num_k), trace.ids.shape[2])


def scores_of(selector: CandidateSelector, batch: CandidateTrace) -> Tensor:
    """[N, K, M] of every candidate after the token that the target said before it."""
    predecessors = F.embedding(batch.tokens[:, :-1].long().clamp(min=0), selector.predecessor_codebook)
    if selector.hidden_projection is not None:
        predecessors = predecessors * F.linear(batch.hidden.float(), selector.hidden_projection)
    pair = torch.einsum("nkr,nkmr->nkm", predecessors, F.embedding(batch.ids.long(), selector.successor_codebook))
    position = torch.arange(batch.ids.shape[1]).clamp(max=len(selector.edge_scale) - 1)  # the last: all later ones
    return selector.unary_scale[position, None] * batch.logits + selector.edge_scale[position, None] * pair


def as_written(selector: CandidateSelector) -> CandidateSelector:
    """A copy with its tables rounded to bfloat16."""
    tensors: dict[str, Any] = {name: each for name, each in selector._asdict().items() if isinstance(each, Tensor)}
    tensors = {name: each.detach().clone() for name, each in tensors.items()}
    tables = {name: each.bfloat16() for name, each in tensors.items() if "scale" not in name}
    return selector._replace(**{**tensors, **tables})


def fit(
    form: str,
    trace: CandidateTrace,
    held: CandidateTrace,
    vocab_size: int,
    target_ids: Tensor,
    rank: int,
    progress: Callable[[int, int], object],
    own: CandidateSelector | None = None,
) -> Fitted:
    """One form's best selector on the development share; none at all, or ``own``, where nothing drafts longer.

    Args:
        form: of FORMS, or OWN.
        held: the development share.
        vocab_size: of the target.
        target_ids: [draft vocabulary] target id of each draft id.
        progress: is told steps done, and of how many.
        own: what the form OWN begins with. Its shapes stay, so that a server that runs with it can be sent the new one.
    """
    torch.manual_seed(0)
    num_k = trace.ids.shape[1]
    begin = own or new_selector(form, trace, (vocab_size, len(target_ids)), rank)
    tensors = {name: each for name, each in begin._asdict().items() if isinstance(each, Tensor)}
    weights: dict[str, Any] = {name: each.float().clone().requires_grad_() for name, each in tensors.items()}
    model = begin._replace(**weights)
    optimizer = torch.optim.AdamW(weights.values(), lr=LEARNING_RATE, weight_decay=0.0)
    position_weight = torch.exp(-torch.arange(num_k) / POSITION_DECAY)
    draft_ids = torch.full((vocab_size,), -1).index_copy(0, target_ids, torch.arange(len(target_ids)))
    start = own or _as_it_was(as_written(model), num_k)
    best = Fitted(form, start, Gain.of(held.accepted(start, target_ids), held.prompt))
    batch_size = min(BATCH, max(1, len(trace.ids) // LEAST_STEPS))
    orders = [rows for _ in range(EPOCHS) for rows in torch.randperm(len(trace.ids)).split(batch_size)]
    every = max(1, len(orders) // (EPOCHS * CHECKS_AN_EPOCH))
    for step, rows in enumerate(orders, start=1):
        batch = trace.rows(rows)
        truth = draft_ids[batch.tokens[:, 1:].long().clamp(min=0)].where(batch.tokens[:, 1:] >= 0, -1)
        matches = batch.ids == truth[..., None]
        losses = F.cross_entropy(
            scores_of(model, batch).flatten(0, 1), matches.int().argmax(-1).flatten(), reduction="none"
        )
        weight = position_weight * matches.any(-1)
        (losses.view_as(weight) * weight).sum().div(weight.sum().clamp(min=1)).backward()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * max(0.05, 1 - step / len(orders))
        optimizer.step()
        optimizer.zero_grad()
        progress(step, len(orders))
        if step % every == 0 or step == len(orders):
            found = as_written(model)
            for selector in (found,) if own else (found, _as_it_was(found, 1)):
                gain = Gain.of(held.accepted(selector, target_ids), held.prompt)
                if gain.length > best.gain.length:
                    best = Fitted(form, selector, gain)
    return best


def _as_it_was(selector: CandidateSelector, num_positions: int) -> CandidateSelector:
    """The same with the first positions at their argmax. Little data cannot harm those."""
    scale, unary = selector.edge_scale.clone(), selector.unary_scale.clone()
    scale[:num_positions], unary[:num_positions] = 0.0, 1.0
    return selector._replace(edge_scale=scale, unary_scale=unary)
