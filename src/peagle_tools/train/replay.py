"""Acceptance of a head without a server: the drafts it would make, walked over text that its target said greedily.

A greedy target accepts a draft as far as it is the text. So one forward over all (anchor, depth) rows of a document
tells every draft that a server could make of it, and the rounds for each K follow from those.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from speculators.models.eagle3.data import shift_batch
from speculators.train.distributed import get_rank
from torch import Tensor
from torch.utils.data import Dataset

from peagle_tools.shared.acceptance import Acceptance, acceptance_of
from peagle_tools.train.draft_model import PEagleDraftModel
from peagle_tools.train.lines import read_lines, write_lines
from peagle_tools.train.partition import Documents, StepRows
from peagle_tools.train.peagle_yaml import Config, ends_in_loop
from peagle_tools.train.selector_training import SelectedDrafts

REPLAY = "replay"  # ``how`` in al.jsonl


@torch.no_grad()
def replay(
    head: PEagleDraftModel,
    documents: Iterable[dict[str, Tensor]],
    num_k: int,
    max_tokens: int,
    chunk_rows: int = 1024,
    noted: list[list[int]] | None = None,
) -> dict[int, Acceptance]:
    """What a greedy target would accept of ``head``'s drafts at each K = 1 .. ``num_k``, its selector's if it has one.

    Drafts past the end of an answer count as refused. Where ``max_tokens`` or a loop ended it, what the target would
    have said next is not known, so rounds with such drafts are left out.

    Args:
        documents: greedy answers as ``shift_batch`` leaves them: input_ids [N], loss_mask [N] and hidden_states
            [N, n_aux * hidden], where position i holds token i + 1 and the target's states at i.
        num_k: at most the depths that the head is trained for.
        max_tokens: to which the answers were limited.
        chunk_rows: rows computed at once.
        noted: gets, for each document, how many of ``num_k`` drafts are accepted after each token of its answer.
    """
    rounds: dict[int, list[int]] = {k: [] for k in range(1, num_k + 1)}  # accepted tokens of each
    for document in documents:
        anchors = document["loss_mask"].nonzero()[:, 0]
        if not len(anchors):
            continue
        first, tokens = int(anchors[0]), document["input_ids"].to(head.fc.weight.device)
        drafts = _drafts(head, tokens, document["hidden_states"].to(head.fc.weight), first, num_k, chunk_rows)
        following = torch.full((len(tokens) - first + num_k,), -1, dtype=tokens.dtype, device=tokens.device)
        following[: len(tokens) - first - 1] = tokens[first + 1 :]
        is_whole = len(tokens) - first < max_tokens and not ends_in_loop(tokens[first:].tolist())
        lengths = (drafts == following.unfold(0, num_k, 1)[: len(drafts)]).cumprod(dim=1).sum(dim=1).tolist()
        if noted is not None:
            noted.append(lengths)
        for k, accepted in rounds.items():
            at = 0
            while at < len(lengths) - (1 if is_whole else k):  # after its last token nothing is drafted
                accepted.append(min(lengths[at], k))
                at += accepted[-1] + 1
    return {k: acceptance_of(accepted, k) for k, accepted in rounds.items()}


def _drafts(
    head: PEagleDraftModel, tokens: Tensor, hidden_states: Tensor, first: int, num_k: int, chunk_rows: int
) -> Tensor:
    """[N - first, num_k] target ids drafted after each position from ``first`` on; past the end they mean nothing."""
    anchors = torch.arange(first, len(tokens), device=tokens.device)
    depth = torch.arange(1, num_k, device=tokens.device).repeat_interleave(len(anchors))
    anchor = anchors.repeat(num_k - 1)
    inside = anchor + depth < len(tokens)
    mask_rows = StepRows(anchor[inside], depth[inside])
    drafts = tokens.new_zeros(len(tokens), num_k)
    selected = None if head.candidate_selector is None else SelectedDrafts(head, len(tokens), num_k)

    def note(states: Tensor, rows: StepRows) -> Tensor:
        hidden = head.norm(states)[0]
        logits = head.lm_head(hidden)
        if selected:
            selected.note(hidden, logits, rows)
        else:
            best = logits.argmax(dim=-1)
            drafts[rows.anchor, rows.depth] = best if head.d2t is None else best + head.d2t[best]
        return states.new_zeros(())

    one_document = Documents(torch.zeros_like(tokens))
    head.sum_over(note, tokens[None], hidden_states[None], one_document, anchors, mask_rows, chunk_rows)
    return (selected.drafts(tokens) if selected else drafts)[first:]


def note_al(file: Path, step: int, how: str, acceptances: Mapping[int, Acceptance]) -> None:
    """Put a line {step, K, al, acceptance, how} for the acceptance at each K into ``file``, al.jsonl.

    Lines of this step and later ones, measured the same way, are replaced: a run that was killed measures them again.

    Args:
        how: ``REPLAY`` or ``vllm``.
    """
    lines = [line for line in read_lines(file, must_exist=False) if line["how"] != how or line["step"] < step]
    for num_k, acceptance in acceptances.items():
        shares = [round(share, 4) for share in acceptance.shares]
        lines.append({"step": step, "K": num_k, "al": round(acceptance.length, 4), "acceptance": shares, "how": how})
    write_lines(file, lines)


def measure(config: Config, head: PEagleDraftModel, held_out: Dataset, step: int) -> tuple[float, list[list[int]]]:
    """AL of ``head`` at the largest of ``config.ks``, by replay, and what ``replay`` noted; al.jsonl gets every AL.

    All processes of a run call it; the first one writes. The answers of ``held_out`` are greedy.
    """
    head.eval()
    documents = (shift_batch(held_out[number]) for number in range(len(held_out)))  # type: ignore[arg-type]
    noted: list[list[int]] = []
    acceptances = replay(head, documents, config.head.depths, config.data.max_tokens, config.step.chunk_rows, noted)
    if get_rank() == 0:
        note_al(config.run / "al.jsonl", step, REPLAY, acceptances)
    return acceptances[max(config.ks)].length, noted
