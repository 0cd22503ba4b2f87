"""``--draft-vocab`` and ``--quantize``: choose, write and measure a smaller head, then sharpen that one."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from peagle_tools.shared.engines import Pair
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.files import new_folder
from peagle_tools.sharpen import run, vocabulary
from peagle_tools.sharpen.prompts import Prompts
from peagle_tools.sharpen.record import STEP
from peagle_tools.sharpen.rewrite import Quantization, faults, rewrite, step_bytes
from peagle_tools.sharpen.trace import CandidateTrace
from peagle_vllm.heads.head import Head, target_ids
from peagle_vllm.heads.target import Target


@dataclass(frozen=True)
class Asked:
    """What is asked for beside a ``run.Plan``.

    Attributes:
        draft_vocab: tokens that the head is trimmed to; None: those it has.
        fits_edge: whether the smaller head is sharpened, too.
    """

    draft_vocab: int | Literal["auto"] | None
    quantize: Quantization | None
    fits_edge: bool

    @property
    def is_smaller(self) -> bool:
        return self.draft_vocab is not None or self.quantize is not None


@dataclass(frozen=True)
class Reduction:
    """What became of a head, before any selector.

    Attributes:
        covered: share of the target's tokens that so many can draft, chosen from nine tenths of the answers and counted
            in the others; None where nothing was trimmed.
        bytes_before: of weights, read by a draft step.
        served: as it was, and reduced.
    """

    draft_vocab: int
    covered: float | None
    bytes_before: int
    bytes_after: int
    served: list[run.Comparison]


def reduce(
    head: Head,
    target: Target,
    prompts: Prompts,
    out: Path,
    asked: Asked,
    plan: run.Plan,
    progress: run.Progress,
) -> tuple[Reduction, run.Sharpened | None]:
    """Write a smaller head to ``out``, with a selector where one is asked for and drafts better.

    Raises:
        ToolError: one line; what was recorded stays in a folder beside ``out``, and the next call goes on from there.
    """
    for fault in faults(head, asked.draft_vocab, asked.quantize):
        raise ToolError(fault)
    if asked.draft_vocab is not None:
        run.refuse_too_few(prompts)
    if out.exists():
        raise ToolError(f"{out} exists; name a folder that does not, nothing is overwritten")
    pair = Pair(target.name, str(head.folder), plan.arguments)
    with run.work_folder(out.with_name(f"{out.name}.reduced"), head, target.name, prompts, plan) as work:
        kept, covered = None, None
        if asked.draft_vocab is not None:
            step = STEP if prompts.answers else None
            kept, covered = _kept(
                head, target, asked, plan, lambda: run.recorded(pair, prompts, work, plan, progress), step
            )
        folder = work / "head"
        shutil.rmtree(folder, ignore_errors=True)
        smaller = rewrite(head, target, folder, kept, asked.quantize)
        measured = run.served(pair, folder, prompts, plan, progress)
        before, after = (step_bytes(one, one.draft_vocab_size, None) for one in (head, smaller))
        reduction = Reduction(smaller.draft_vocab_size, covered, before, after, measured)
        report = None
        if asked.fits_edge:

            def again(what: str, done: int, of: int) -> object:
                return progress(f"{what} the smaller head", done, of)

            report = run.sharpen(smaller, target.name, target.vocab_size, prompts, out, plan, again)
        if report is None or not report.is_better:
            with new_folder(out) as made:
                shutil.copytree(folder, made, dirs_exist_ok=True)
    return reduction, report


def _kept(
    head: Head, target: Target, asked: Asked, plan: run.Plan, record: Callable[[], CandidateTrace], step: int | None
) -> tuple[Tensor | None, float]:
    """Draft ids to keep, ascending (None: all), and ``Reduction.covered``."""
    ids, size = torch.from_numpy(target_ids(head)), asked.draft_vocab
    specials = vocabulary.special_ids(target.name)
    least = int(torch.isin(ids, torch.tensor(sorted(specials))).sum())
    if isinstance(size, int) and size < max(least, plan.num_candidates):
        raise ToolError(
            f"--draft-vocab is {size}, and {least} special tokens are kept always, {plan.num_candidates} candidates "
            "compared; give a larger one"
        )
    if size == "auto":
        rest = vocabulary.target_bytes(target.name, plan.num_speculative_tokens + 1)
    trace = record()

    def counted(part: CandidateTrace) -> Tensor:
        return vocabulary.count_tokens(part, ids, target.vocab_size, step)

    learned, held = trace.divided()
    order, unseen = vocabulary.ranked(counted(learned), ids, specials), counted(held)
    if size == "auto":
        size = vocabulary.best_size(order, ids, held, least, lambda n: rest + step_bytes(head, n, asked.quantize))
        if size == len(ids) and asked.quantize is None:
            raise ToolError(f"--draft-vocab auto: fewer than {size} tokens are not expected to be faster; leave it out")
    assert isinstance(size, int)
    covered = float(unseen[ids[order[:size]]].sum() / unseen.sum())
    kept = vocabulary.ranked(counted(trace), ids, specials)[:size].sort().values
    return (None if size == len(ids) else kept), covered
