"""Fit a selector to a trace, and choose its form by drafts that were kept aside."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    """Where fitting begins for one of FORMS."""
    num_k, hidden_size = trace.ids.shape[1], trace.hidden.shape[-1]
    tables = torch.randn(sizes[0], rank) / rank**0.5, 0.02 * torch.randn(sizes[1], rank)
    projection = torch.randn(rank, hidden_size) / hidden_size**0.5 if form == "gated" else None
    return CandidateSelector(*tables, projection, torch.ones(num_k), torch.ones(num_k), trace.ids.shape[2])


class SelectorModel(nn.Module):
    """The tensors of a ``CandidateSelector`` while they are fitted."""

    def __init__(self, start: CandidateSelector):
        super().__init__()

        def parameter(tensor: Tensor) -> nn.Parameter:
            return nn.Parameter(tensor.float().clone())

        self.predecessors, self.successors = map(parameter, start[:2])
        self.projection = None if start.hidden_projection is None else parameter(start.hidden_projection)
        self.edge_scale, self.unary_scale = parameter(start.edge_scale), parameter(start.unary_scale)
        self.num_candidates = start.num_candidates

    def scores(self, batch: CandidateTrace) -> Tensor:
        """[N, K, M] of every candidate after the token that the target said before it."""
        predecessors = F.embedding(batch.tokens[:, :-1].long().clamp(min=0), self.predecessors)
        if self.projection is not None:
            predecessors = predecessors * F.linear(batch.hidden.float(), self.projection)
        pair = torch.einsum("nkr,nkmr->nkm", predecessors, F.embedding(batch.ids.long(), self.successors))
        position = torch.arange(batch.ids.shape[1]).clamp(max=len(self.edge_scale) - 1)  # the last: all later ones
        return self.unary_scale[position, None] * batch.logits + self.edge_scale[position, None] * pair

    def selector(self) -> CandidateSelector:
        """As it is written, rounded to bfloat16."""
        projection = None if self.projection is None else self.projection.detach().bfloat16()
        tables = self.predecessors.detach().bfloat16(), self.successors.detach().bfloat16()
        scales = self.edge_scale.detach().clone(), self.unary_scale.detach().clone()
        return CandidateSelector(*tables, projection, *scales, self.num_candidates)


def to_draft_ids(sizes: tuple[int, int], offsets: Tensor | None) -> Tensor:
    """[target vocabulary] the draft id of each target token; -1 where the head cannot draft it."""
    draft = torch.arange(sizes[1])
    found = torch.full((sizes[0],), -1, dtype=torch.int64)
    found[draft if offsets is None else draft + offsets] = draft
    return found


def fit(
    form: str,
    trace: CandidateTrace,
    held: CandidateTrace,
    sizes: tuple[int, int],
    rank: int,
    offsets: Tensor | None,
    on_batch: Callable[[], object],
    own: CandidateSelector | None = None,
) -> Fitted:
    """One form's best selector on the development share; none at all, or ``own``, where nothing drafts longer.

    Args:
        form: of FORMS, or OWN.
        held: the development share.
        sizes: target vocabulary, draft vocabulary.
        offsets: [draft vocabulary] target id minus draft id; None: the same ids.
        own: what the form OWN begins with. Its shapes stay, so that a server that runs with it can be sent the new one.
    """
    torch.manual_seed(0)
    num_k = trace.ids.shape[1]
    model = SelectorModel(own or new_selector(form, trace, sizes, rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    weight = torch.exp(-torch.arange(num_k) / POSITION_DECAY)
    draft_ids = to_draft_ids(sizes, offsets)
    start = own or _as_it_was(model.selector(), num_k)
    best = Fitted(form, start, Gain.of(held.accepted(start, offsets), held.prompt))
    orders = [rows for _ in range(EPOCHS) for rows in torch.randperm(len(trace.ids)).split(_batch(len(trace.ids)))]
    every = max(1, len(orders) // (EPOCHS * CHECKS_AN_EPOCH))
    for step, rows in enumerate(orders, start=1):
        batch = trace.rows(rows)
        truth = draft_ids[batch.tokens[:, 1:].long().clamp(min=0)].where(batch.tokens[:, 1:] >= 0, -1)
        matches = batch.ids == truth[..., None]
        known = matches.any(-1)
        losses = F.cross_entropy(
            model.scores(batch).flatten(0, 1), matches.int().argmax(-1).flatten(), reduction="none"
        )
        weights = weight * known
        (losses.view_as(weights) * weights).sum().div(weights.sum().clamp(min=1)).backward()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * max(0.05, 1 - step / len(orders))
        optimizer.step()
        optimizer.zero_grad()
        on_batch()
        if step % every == 0 or step == len(orders):
            for selector in (model.selector(), *(() if own else (_as_it_was(model.selector(), 1),))):
                gain = Gain.of(held.accepted(selector, offsets), held.prompt)
                if gain.length > best.gain.length:
                    best = Fitted(form, selector, gain)
    return best


def num_batches(num_drafts: int) -> int:
    """Batches that ``fit`` takes."""
    return EPOCHS * -(-num_drafts // _batch(num_drafts))


def _batch(num_drafts: int) -> int:
    return min(BATCH, max(1, num_drafts // LEAST_STEPS))


def _as_it_was(selector: CandidateSelector, num_positions: int) -> CandidateSelector:
    """The same with the first positions at their argmax. Little data cannot harm those."""
    scale, unary = selector.edge_scale.clone(), selector.unary_scale.clone()
    scale[:num_positions], unary[:num_positions] = 0.0, 1.0
    return selector._replace(edge_scale=scale, unary_scale=unary)
