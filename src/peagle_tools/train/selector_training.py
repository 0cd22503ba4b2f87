"""A candidate selector that is trained with its head: DFlash2's, from the first step on.

It chooses among the best candidates of a row, given the token before: the one at position a + d for row (a, d).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from speculators.models.dflash2.metrics import selector_training_candidates
from speculators.models.dflash2.model_definitions import CandidateSelector
from speculators.train import optimizers as library
from torch import Tensor

from peagle_kernels import select_candidates
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.selector_file import NUM_CANDIDATES
from peagle_tools.train.partition import Documents, StepRows
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER, download
from peagle_vllm.heads.selector import EDGE_SCALE, PREDECESSORS, PROJECTION, SUCCESSORS

LEARNING_RATE = 3e-3  # with the head's schedule
TENSORS = (PREDECESSORS, SUCCESSORS, PROJECTION)


def new_selector(head: Any, rank: int, init: str | None) -> CandidateSelector:
    """A selector for ``head`` that changes no draft yet.

    Where the head named ``init`` has one that was trained with it, the new one begins as that. ToolError where that
    has another rank.
    """
    sizes = {"hidden_size": head.hidden_size, "rank": rank, "top_k": min(NUM_CANDIDATES, head.draft_vocab_size)}
    selector = CandidateSelector(vocab_size=head.draft_vocab_size, **sizes)
    selector.predecessor_codebook = torch.nn.Parameter(torch.zeros(head.verifier_vocab_size, rank))
    torch.nn.init.normal_(selector.successor_codebook, std=rank**-0.5)
    torch.nn.init.normal_(selector.hidden_projection.weight, std=head.hidden_size**-0.5)
    file = download(init) / SELECTOR_FOLDER / "model.safetensors" if init not in (None, "target") else None
    if not file or not file.exists():
        return selector
    tensors = load_file(file)
    if len(tensors.get(EDGE_SCALE, ())) == 1:  # one by ``sharpen`` scales each position, and is none of these
        if (theirs := tensors[PREDECESSORS].shape[1]) != rank:
            raise ToolError(f"selector.rank: is {rank}, and that of head.init is {theirs}; set it to that")
        selector.load_state_dict({name.removeprefix(f"{SELECTOR}."): tensors[name] for name in TENSORS})
    return selector


def build_optimizers(model: torch.nn.Module, options: Any) -> list[torch.optim.Optimizer]:
    """speculators' optimizers; a selector is a group of AdamW's with its own rate, without weight decay."""
    named = list(model.named_parameters())
    head = SimpleNamespace(named_parameters=lambda: [(name, weight) for name, weight in named if SELECTOR not in name])
    optimizers = library.build_optimizers(head, options)
    selector = [(name, weight) for name, weight in named if SELECTOR in name]
    if selector:  # Muon comes before AdamW
        optimizers[-1].add_param_group({"params": selector, "lr": LEARNING_RATE, "weight_decay": 0.0})
    return optimizers


def served(predecessors: Tensor, successors: Tensor, projection: Tensor) -> select_candidates.CandidateSelector:
    """The selector as it is served, both scales 1, from the parameters in ``TENSORS``."""
    ones, num_candidates = torch.ones(1, device=successors.device), min(NUM_CANDIDATES, len(successors))
    return select_candidates.CandidateSelector(predecessors, successors, projection, ones, ones.clone(), num_candidates)


def mean_over_processes(count: Tensor, head: Any) -> Tensor:
    """The mean of ``count`` over training processes, whose gradients DDP averages: so each row counts alike."""
    if head.training and dist.is_initialized():
        count = count.double()
        dist.all_reduce(count)
        count /= dist.get_world_size()
    return count


def selector_loss(
    head: Any, metrics: dict[str, Tensor], input_ids: Tensor, loss_mask: Tensor, documents: Documents, rows: StepRows
) -> Callable[[Tensor, Tensor, StepRows], Tensor]:
    """The selector's part of a step: cross-entropy of the token that follows, among the best candidates of its row.

    A mean over the rows whose next token is in their document and can be drafted. Where it is no candidate it takes the
    last one's place.

    Args:
        metrics: receives the loss, named as speculators names its own.
        rows: those of the whole step.

    Returns:
        What some of the rows add, of their states after the last norm [n, hidden] and unary logits [n, draft
        vocabulary].
    """
    selector, tokens = head.candidate_selector, input_ids[0]
    following = torch.full_like(tokens, -1)  # [N] draft id of the token after each position; -1: no loss
    within = (documents.ids[1:] == documents.ids[:-1]) & (loss_mask[0, :-1] != 0)
    following[:-1] = tokens[1:].where(within, -1)
    if head.t2d is not None:
        draft_ids = (head.t2d.cumsum(0) - 1).where(head.t2d, -1)
        following = draft_ids[following].where(following >= 0, -1)
    total = mean_over_processes((following[rows.position] >= 0).sum(), head).clamp(min=1)

    def loss_of(hidden: Tensor, logits: Tensor, rows: StepRows) -> Tensor:
        truth = following[rows.position]
        best = logits.detach().topk(selector.top_k, dim=-1).indices
        ids, place = selector_training_candidates(best, truth.clamp(min=0))[:2]
        edges = selector.transition_scores(hidden, tokens[rows.position], ids)
        scores = logits.gather(-1, ids) + edges  # not rounded to the dtype of the logits, as in serving
        loss = (F.cross_entropy(scores, place, reduction="none") * (truth >= 0)).sum() / total
        metrics["selector_loss_sum"] = metrics.get("selector_loss_sum", 0) + loss.detach()
        metrics["selector_loss_total"] = torch.ones_like(loss)  # a step
        return loss

    return loss_of


class SelectedDrafts:
    """The candidates of all (position, depth) rows of one document, and what the head's selector makes of them."""

    def __init__(self, head: Any, num_tokens: int, num_k: int):
        module, device = head.candidate_selector, head.fc.weight.device
        self.projection, self.offsets = module.hidden_projection, head.d2t
        self.selector = served(module.predecessor_codebook, module.successor_codebook, self.projection.weight)
        shape = (num_tokens, num_k, self.selector.num_candidates)
        self.ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logits = torch.zeros(shape, device=device)
        self.gates = torch.zeros(num_tokens, num_k, self.projection.out_features, device=device)

    def note(self, hidden: Tensor, logits: Tensor, rows: StepRows) -> None:
        """States after the last norm [n, hidden] and logits [n, draft vocabulary] of ``rows``."""
        at, best = (rows.anchor, rows.depth), logits.topk(self.selector.num_candidates, dim=-1)
        self.ids[at], self.logits[at] = best.indices, best.values.float()
        self.gates[at] = self.projection(hidden).float()

    def drafts(self, tokens: Tensor) -> Tensor:
        """[N, num_k] target ids, left to right; the token of ``tokens`` [N] at a position precedes its first draft."""
        out, scores = tokens.new_zeros(self.ids.shape[:2]), torch.empty_like(self.logits)
        anchors = torch.arange(len(tokens), device=tokens.device).repeat_interleave(self.ids.shape[1])
        ids, logits = self.ids.flatten(0, 1), self.logits.flatten(0, 1)
        candidates = select_candidates.Candidates(ids, logits, self.gates.flatten(0, 1), tokens, anchors)
        with torch.autocast(tokens.device.type, enabled=False):  # in float32, as it is served
            select_candidates.select_candidates_torch(out, candidates, self.selector, self.offsets, scores)
        return out
