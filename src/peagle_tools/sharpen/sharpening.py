"""The whole of ``peagle-vllm sharpen``: record, fit, measure, write. Every step that is finished stays."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from peagle_kernels import CandidateSelector
from peagle_tools.shared import engines
from peagle_tools.shared.acceptance import Acceptance
from peagle_tools.shared.atomic_files import new_folder, write_whole
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.selector_file import read_selector, write_selector
from peagle_tools.sharpen import fit, record
from peagle_tools.sharpen.split_prompts import Prompts
from peagle_tools.sharpen.trace import CandidateTrace, Gain
from peagle_vllm.heads.convert import write_json
from peagle_vllm.heads.files import SELECTOR_FOLDER, one_line, read_json
from peagle_vllm.heads.head import Head, target_ids
from peagle_vllm.heads.selector import head_hash
from peagle_vllm.heads.target import Target

LEAST_PROMPTS = 40  # below it less than a group of prompts chooses the form
LEAST_HELD_OUT = 2 * engines.GROUP  # a standard error needs two groups
MEASURED = (3, 5, 7)

Progress = Callable[[str, int, int], object]  # what is done, how much of it, of how much


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    num_speculative_tokens: int
    rank: int
    num_candidates: int
    max_tokens: int
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What every step is done with."""

    target: Target
    prompts: Prompts
    plan: Plan
    progress: Progress

    def pair(self, head: Path | None) -> engines.Pair:
        return engines.Pair(self.target.name, str(head), self.plan.arguments)


@dataclass(frozen=True)
class ServedGain:
    """Acceptance of one K, served, before and after, over the same held-out prompts."""

    num_speculative_tokens: int
    before: Gain
    after: Gain
    difference: Gain  # of the paired groups; ``length`` is what is gained


@dataclass(frozen=True)
class Sharpened:
    """What ``sharpen`` found on the development share, and served."""

    forms: dict[str, Gain]
    chosen: str
    drafts: int
    served: list[ServedGain]

    @property
    def is_better(self) -> bool:
        """Whether the largest K gains more than the standard error of the gain."""
        gained = self.served[-1].difference
        return gained.length > gained.error

    def tables(self) -> tuple[Table, Table]:
        """Forms on the development share, and AL as served."""
        forms = Table("form", "AL on the development share", title=f"{self.drafts:,} drafts recorded")
        for name, gain in self.forms.items():
            forms.add_row(f"{name} (chosen)" if name == self.chosen else name, f"{gain.length:.3f} ± {gain.error:.3f}")
        served = Table("K", "AL before", "AL after", "gain", title="served, held-out prompts")
        for row in self.served:
            lengths = [f"{gain.length:.3f} ± {gain.error:.3f}" for gain in (row.before, row.after)]
            served.add_row(
                str(row.num_speculative_tokens), *lengths, f"{row.after.length / row.before.length - 1:+.1%}"
            )
        return forms, served


def sharpen(head: Head, job: Job, out: Path) -> Sharpened:
    """Fit a selector to ``head`` and write the sharpened head to ``out`` when it drafts better.

    Raises:
        ToolError: one line; what was recorded stays in a folder beside ``out``, and the next call continues from there.
    """
    refuse_too_few(job.prompts)
    plan = job.plan
    with work_folder(head, job, out) as work:
        trace = recorded(head, job, work)
        own = read_selector(head)
        if own and (own.predecessor_codebook.shape[1], own.num_candidates) != (plan.rank, plan.num_candidates):
            own = None  # others were asked for
        fitted = _fitted(trace, head, job, own)
        best = max(fitted, key=lambda one: one.gain.length)
        sharpened = work / "sharpened"
        shutil.rmtree(sharpened, ignore_errors=True)
        sharpened.mkdir()
        write_sharpened(sharpened, head, best.selector)
        measured = served(head, sharpened, job)
        report = Sharpened({one.form: one.gain for one in fitted}, best.form, len(trace.ids), measured)
        if report.is_better:
            with new_folder(out) as folder:
                for path in sharpened.iterdir():
                    path.rename(folder / path.name)  # both lie beside ``out``
                write_json(folder / SELECTOR_FOLDER / "sharpen.json", as_dict(report, plan))
    return report


def refuse_too_few(prompts: Prompts) -> None:
    """Raises ToolError."""
    for count, least, what in (
        (len(prompts.learn), LEAST_PROMPTS, "prompts to learn from"),
        (len(prompts.held_out), LEAST_HELD_OUT, "prompts to measure with"),
    ):
        if count < least:
            raise ToolError(f"{count} {what}, at least {least} are needed; 1,500 in all do well")


@contextmanager
def work_folder(head: Head, job: Job, out: Path) -> Iterator[Path]:
    """A folder beside ``out`` for what is recorded; removed at the end, kept on any error."""
    if out.exists():
        raise ToolError(f"{out} exists; name a folder that does not, nothing is overwritten")
    work = out.parent / f".{out.name}.sharpen"
    asked = {
        "head": head_hash(head),
        "target": job.target.name,
        "prompts": hashlib.sha256(json.dumps(job.prompts.learn).encode()).hexdigest(),
        **asdict(job.plan),
    }
    try:
        work.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds users' text where prompts are recorded ones
        note = work / "plan.json"
        if not note.exists():
            write_whole(note, json.dumps(asked, indent=2))
        elif read_json(note) != asked:
            raise ToolError(f"{work} was begun with another head, prompts or options; remove it, or name another OUT")
        yield work
    except OSError as error:
        raise ToolError(f"{work} cannot be written ({one_line(error.strerror or error)}); {record.RETRY}") from None
    shutil.rmtree(work, ignore_errors=True)


def recorded(head: Head, job: Job, work: Path) -> CandidateTrace:
    """The target's answers beside what the head proposed; those in ``work`` already are not asked for again."""
    plan, prompts = job.plan, job.prompts.learn
    wanted = [file for file, _ in record.shards(prompts, work)]
    with ThreadPoolExecutor(1) as thread:
        numbers = plan.num_speculative_tokens, plan.num_candidates, plan.max_tokens
        running = thread.submit(engines.in_process, record.record_all, job.pair(head.folder), prompts, work, *numbers)
        while not running.done():
            job.progress("record", sum(file.exists() for file in wanted), len(wanted))
            wait([running], timeout=1)
        running.result()
    return CandidateTrace.joined([CandidateTrace.load(file) for file in wanted])


def _fitted(trace: CandidateTrace, head: Head, job: Job, own: CandidateSelector | None) -> list[fit.Fitted]:
    """The best selector of each form."""
    learned, held = trace.divided()
    sizes = job.target.vocab_size, torch.from_numpy(target_ids(head)), job.plan.rank
    return [
        fit.fit(form, learned, held, *sizes, partial(job.progress, f"fit {form}"), own)
        for form in ((fit.OWN,) if own else fit.FORMS)
    ]


def served(head: Head, changed: Path, job: Job) -> list[ServedGain]:
    """What the head in ``changed`` gains over ``head``, by K."""
    found, plan = [], job.plan
    depths = sorted({k for k in MEASURED if k < plan.num_speculative_tokens} | {plan.num_speculative_tokens})
    for number, k in enumerate(depths):
        seen: list[list[Acceptance]] = []
        for at, folder in enumerate((head.folder, changed)):
            job.progress("measure", 2 * number + at, 2 * len(depths))
            asked = job.prompts.held_out, k, plan.max_tokens
            seen.append(engines.in_process(engines.measure, job.pair(folder), *asked))
        before, after = (
            Gain.over(*torch.tensor([(group.num_accepted, group.num_drafts) for group in groups]).T) for groups in seen
        )
        paired = torch.tensor([b.length - a.length for a, b in zip(*seen, strict=True)])
        error = float(paired.std() / len(paired) ** 0.5)
        found.append(ServedGain(k, before, after, Gain(after.length - before.length, error)))
    return found


def write_sharpened(folder: Path, head: Head, selector: CandidateSelector) -> None:
    """The head as it is, its config with the selector_config, and the selector in a folder of its own."""
    assert head.folder is not None
    for file in head.folder.iterdir():
        if file.is_file():
            shutil.copy(file, folder / file.name)
    write_selector(folder, head, selector)


def as_dict(report: Sharpened, plan: Plan) -> dict[str, Any]:
    """For JSON."""
    return {"plan": asdict(plan), **asdict(report)}
