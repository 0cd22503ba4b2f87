"""``--draft-vocab`` and ``--quantize``: choose, write and measure a smaller head, then sharpen that one."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.files import new_folder
from peagle_tools.shared.prompts import read_tokenizer
from peagle_tools.sharpen import run
from peagle_tools.sharpen.rewrite import Quantization, faults, rewrite
from peagle_tools.sharpen.trace import CandidateTrace
from peagle_vllm.heads.head import Head, target_ids

NOT_READ = ("embed_tokens.weight", "d2t", "t2d", "mask_hidden")  # by a draft step: single rows of it at most


@dataclass(frozen=True)
class Reduction:
    """What became of a head, before any selector."""

    draft_vocab: int
    # Share of the target's tokens that so many can draft, chosen from nine tenths of the answers and counted in the
    # others; None where nothing was trimmed.
    covered: float | None
    bytes_before: int  # of weights, read by a draft step
    bytes_after: int
    served: list[run.ServedGain]  # as it was, and reduced

    def table(self) -> Table:
        """What the smaller head saves, and what it loses."""
        before, after = self.bytes_before, self.bytes_after
        title = f"{self.draft_vocab:,} draft tokens"
        if self.covered is not None:
            title += f", {self.covered:.2%} of what the target says"
        read = f"{before / 1e6:,.1f} -> {after / 1e6:,.1f} MB ({after / before - 1:+.0%})"
        return run.served_table(f"{title}; weights a draft step reads: {read}", self.served)


def reduce(
    head: Head, job: run.Job, out: Path, draft_vocab: int | None, quantize: Quantization | None, fits_selector: bool
) -> tuple[Reduction, run.Sharpened | None]:
    """Write a smaller head to ``out``, with a selector where one is asked for and drafts better.

    Args:
        draft_vocab: tokens that the head is trimmed to; None: those it has.
        fits_selector: whether the smaller head is sharpened, too.

    Raises:
        ToolError: one line; what was recorded stays in a folder beside ``out``, and the next call goes on from there.
    """
    for fault in faults(head, draft_vocab, quantize):
        raise ToolError(fault)
    run.refuse_too_few(job.prompts, learns=draft_vocab is not None or fits_selector)
    with run.work_folder(head, job, out, ".reduced.sharpen") as work:
        kept, covered = None, None
        if draft_vocab is not None:
            kept, covered = _kept(head, job, draft_vocab, work)
        folder = work / "head"
        shutil.rmtree(folder, ignore_errors=True)
        smaller = rewrite(head, job.target, folder, kept, quantize)
        measured = run.served(head, folder, job)
        before, after = step_bytes(head), step_bytes(smaller)
        reduction = Reduction(smaller.draft_vocab_size, covered, before, after, measured)
        report = run.sharpen(smaller, job, out) if fits_selector else None
        if report is None or not report.is_better:
            with new_folder(out) as made:
                shutil.copytree(folder, made, dirs_exist_ok=True)
    return reduction, report


def _kept(head: Head, job: run.Job, size: int, work: Path) -> tuple[Tensor, float]:
    """Draft ids to keep, ascending, and ``Reduction.covered``."""
    ids, specials = torch.from_numpy(target_ids(head)), special_ids(job.target.name)
    num_specials, num_candidates = int(torch.isin(ids, torch.tensor(sorted(specials))).sum()), job.plan.num_candidates
    if size < (least := max(num_specials, num_candidates)):
        raise ToolError(
            f"--draft-vocab is {size}, but {num_specials} special tokens are always kept, and a position has "
            f"{num_candidates} candidates; give at least {least}"
        )
    parts = run.recorded(head, job, work).divided()
    learned, held = (count_tokens(part, ids, job.target.vocab_size) for part in parts)
    covered = float(held[ids[ranked(learned, ids, specials)[:size]]].sum() / held.sum())
    return ranked(learned + held, ids, specials)[:size].sort().values, covered


def step_bytes(head: Head) -> int:
    """What one draft step reads of the weights."""
    return sum(info.num_bytes for name, info in head.tensors.items() if name not in NOT_READ)


def special_ids(target: str) -> set[int]:
    """The tokens that the target's tokenizer adds to those that text is made of, ends of text among them."""
    tokenizer = read_tokenizer(target)
    return {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}


def count_tokens(trace: CandidateTrace, target_ids: Tensor, vocab_size: int) -> Tensor:
    """[vocab_size] how often the target said each token in the recorded answers.

    Drafts overlap where tokens were refused; the bonus token and the accepted ones of each make up the text once.

    Args:
        target_ids: [draft vocabulary] target id of each draft id.
    """
    accepted = trace.accepted(None, target_ids)
    said = torch.arange(trace.tokens.shape[1]) <= accepted[:, None]
    return torch.bincount(trace.tokens[said & (trace.tokens >= 0)].long(), minlength=vocab_size)


def ranked(counts: Tensor, target_ids: Tensor, specials: set[int]) -> Tensor:
    """[draft vocabulary] draft ids: special tokens, then the most said. Equals: the lower id, which is the commoner
    token in vocabularies made by merging."""
    said = counts[target_ids]
    said[torch.isin(target_ids, torch.tensor(sorted(specials), dtype=torch.int64))] = counts.max() + 1
    return said.argsort(descending=True, stable=True)
