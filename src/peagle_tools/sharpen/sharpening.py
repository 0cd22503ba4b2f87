"""The whole of ``peagle-vllm sharpen``: record, fit, write, measure."""

import random
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tqdm import tqdm

from peagle_kernels.select_candidates import CandidateSelector
from peagle_tools.shared import engines
from peagle_tools.shared.atomic_files import new_folder
from peagle_tools.shared.conversations import Messages
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.selector_file import read_selector, write_selector
from peagle_tools.sharpen import fit, record
from peagle_tools.sharpen.trace import CandidateTrace, Gain
from peagle_vllm.heads.convert import write_json
from peagle_vllm.heads.files import SELECTOR_FOLDER
from peagle_vllm.heads.head import Head, target_ids
from peagle_vllm.heads.selector import read_selector_config
from peagle_vllm.heads.target import Target

HELD_OUT = 64  # prompts at most, and a fifth of few
LEAST_PROMPTS = 40  # below it less than a group of prompts chooses the form
LEAST_HELD_OUT = 2 * engines.GROUP  # a standard error needs two groups
ENOUGH = "1,500 in all do well"
MEASURED = (3, 5, 7)


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
    learn: list[list[int]]  # token ids of each prompt
    held_out: list[list[int]]  # measured, and nothing else
    plan: Plan

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
    """What ``sharpen`` measured: on the development share, and served."""

    plan: Plan
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
            forms.add_row(f"{name} (chosen)" if name == self.chosen else name, gain.shown)
        served = Table("K", "AL before", "AL after", "gain", title="served, held-out prompts")
        for row in self.served:
            change = f"{row.after.length / row.before.length - 1:+.1%}"
            served.add_row(str(row.num_speculative_tokens), row.before.shown, row.after.shown, change)
        return forms, served


def split(prompts: list[Messages], held_out: list[Messages] | None) -> tuple[list[Messages], list[Messages]]:
    """Prompts to learn from, and to measure with: some of them, where no others are given. None is in both."""
    mixed = random.Random(0).sample(prompts, len(prompts))  # a file may be sorted
    aside = mixed[: min(HELD_OUT, len(mixed) // 5)] if held_out is None else held_out
    return [prompt for prompt in mixed if prompt not in aside], aside


class NoGain(Exception):
    """Nothing is to be written."""


def sharpen(head: Head, job: Job, out: Path) -> Sharpened:
    """Fit a selector to ``head`` and write the sharpened head to ``out`` when it drafts better.

    Raises:
        ToolError: one line; nothing is written.
    """
    if len(job.learn) < LEAST_PROMPTS:
        raise ToolError(f"{len(job.learn)} prompts to learn from, at least {LEAST_PROMPTS} are needed; {ENOUGH}")
    if len(job.held_out) < LEAST_HELD_OUT:
        raise ToolError(f"{len(job.held_out)} prompts to measure with, at least {LEAST_HELD_OUT} are needed; {ENOUGH}")
    with suppress(NoGain), new_folder(out) as folder:
        trace = recorded(head, job, folder / "trace")
        fitted = fitted_forms(trace, head, job)
        best = max(fitted, key=lambda candidate: candidate.gain.length)
        write_sharpened(folder, head, best.selector)
        forms = {candidate.form: candidate.gain for candidate in fitted}
        report = Sharpened(job.plan, forms, best.form, len(trace.ids), served(head, folder, job))
        if not report.is_better:
            raise NoGain
        write_json(folder / SELECTOR_FOLDER / "sharpen.json", asdict(report))
    return report


def recorded(head: Head, job: Job, folder: Path) -> CandidateTrace:
    """The target's answers and what the head proposed; ``folder`` holds them meanwhile."""
    plan = job.plan
    folder.mkdir()
    sizes = plan.num_speculative_tokens, plan.num_candidates, plan.max_tokens
    engines.in_process(record.record_all, job.pair(head.folder), job.learn, folder, *sizes)
    trace = CandidateTrace.joined([CandidateTrace.load(file) for file in sorted(folder.iterdir())])
    shutil.rmtree(folder)
    return trace


def fitted_forms(trace: CandidateTrace, head: Head, job: Job) -> list[fit.Fitted]:
    """The best selector of each form; of the head's existing one alone, where that has the sizes that are asked for."""
    plan, config = job.plan, read_selector_config(head.config, head.config_file)
    has_sizes = config and (config.selector_rank, config.selector_top_k) == (plan.rank, plan.num_candidates)
    existing = read_selector(head) if has_sizes else None
    learned, held = trace.divided()
    sizes = job.target.vocab_size, torch.from_numpy(target_ids(head)), plan.rank
    return [fit.fit(form, learned, held, *sizes, existing) for form in ((fit.EXISTING,) if existing else fit.FORMS)]


def served(head: Head, changed: Path, job: Job) -> list[ServedGain]:
    """What the head in ``changed`` gains over ``head``, by K."""
    gains, largest = [], job.plan.num_speculative_tokens
    for k in tqdm([*(k for k in MEASURED if k < largest), largest], "measure", leave=False, disable=None):
        groups = [
            engines.in_process(engines.measure, job.pair(folder), job.held_out, k, job.plan.max_tokens)
            for folder in (head.folder, changed)
        ]
        before, after = map(Gain.of_groups, groups)
        paired = torch.tensor([b.length - a.length for a, b in zip(*groups, strict=True)])
        error = float(paired.std() / len(paired) ** 0.5)
        gains.append(ServedGain(k, before, after, Gain(after.length - before.length, error)))
    return gains


def write_sharpened(folder: Path, head: Head, selector: CandidateSelector) -> None:
    """The head as it is, its config with the selector_config, and the selector in a folder of its own."""
    assert head.folder is not None
    for file in head.folder.iterdir():
        if file.is_file():
            shutil.copy(file, folder / file.name)
    write_selector(folder, head, selector)
