"""The whole of ``peagle-vllm sharpen``: record, fit, write, measure."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peagle_kernels.select_candidates import CandidateSelector
from peagle_tools.shared import engines
from peagle_tools.shared.acceptance import sum_of
from peagle_tools.shared.atomic_files import new_folder
from peagle_tools.shared.conversations import Messages
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.selector_file import NUM_CANDIDATES, write_selector
from peagle_tools.sharpen import fit, record
from peagle_tools.sharpen.trace import CandidateTrace
from peagle_vllm.heads.head import Head, target_ids
from peagle_vllm.heads.target import Target

HELD_OUT = 64  # prompts at most, and a fifth of few
LEAST_PROMPTS = 40  # below it less than a group of prompts chooses the checkpoint
LEAST_HELD_OUT = 2 * engines.GROUP  # a standard error needs two groups
ENOUGH = "1,500 in all do well"


@dataclass(frozen=True)
class Job:
    """What every step is done with."""

    target: Target
    learn: list[list[int]]  # token ids of each prompt
    held_out: list[list[int]]  # measured, and nothing else
    num_speculative_tokens: int
    rank: int
    max_tokens: int
    arguments: dict[str, Any]  # more ones of ``vllm.LLM``

    def pair(self, head: Path | None) -> engines.Pair:
        return engines.Pair(self.target.name, str(head), self.arguments)


def split(prompts: list[Messages], held_out: list[Messages] | None) -> tuple[list[Messages], list[Messages]]:
    """Prompts to learn from, and to measure with: some of them, where no others are given. None is in both."""
    mixed = random.Random(0).sample(prompts, len(prompts))  # a file may be sorted
    aside = mixed[: min(HELD_OUT, len(mixed) // 5)] if held_out is None else held_out
    return [prompt for prompt in mixed if prompt not in aside], aside


class NoGain(Exception):
    """Nothing is written; the message is what was measured."""


def sharpen(head: Head, job: Job, out: Path) -> str:
    """Fit a selector to ``head`` and write the sharpened head to ``out``; what was measured.

    NoGain where no more is gained than the standard error of the gain.
    """
    if len(job.learn) < LEAST_PROMPTS:
        raise ToolError(f"{len(job.learn)} prompts to learn from, at least {LEAST_PROMPTS} are needed; {ENOUGH}")
    if len(job.held_out) < LEAST_HELD_OUT:
        raise ToolError(f"{len(job.held_out)} prompts to measure with, at least {LEAST_HELD_OUT} are needed; {ENOUGH}")
    with new_folder(out) as folder:
        trace = recorded(head, job, folder / "trace")
        learned, held = trace.divided()
        sizes = job.target.vocab_size, torch.from_numpy(target_ids(head)), job.rank
        write_sharpened(folder, head, fit.fit(learned, held, *sizes))
        before, after, error = served(head, folder, job)
        lengths = f"AL {before:.3f} before, {after:.3f} after ({after / before - 1:+.1%})"
        gain = f"served, K = {job.num_speculative_tokens}, held-out prompts: {lengths}, a gain of {after - before:.3f}"
        report = f"{len(trace.ids):,} drafts recorded\n{gain} ± {error:.3f}"
        if after - before <= error:
            raise NoGain(report)
    return report


def recorded(head: Head, job: Job, folder: Path) -> CandidateTrace:
    """The target's answers and what the head proposed; ``folder`` holds them meanwhile."""
    folder.mkdir()
    sizes = job.num_speculative_tokens, NUM_CANDIDATES, job.max_tokens
    engines.in_process(record.record_all, job.pair(head.folder), job.learn, folder, *sizes)
    trace = CandidateTrace.joined([CandidateTrace.load(file) for file in sorted(folder.iterdir())])
    shutil.rmtree(folder)
    return trace


def served(head: Head, changed: Path, job: Job) -> tuple[float, float, float]:
    """AL of ``head``, that of the head in ``changed``, and the standard error of their difference."""
    sizes, heads = (job.num_speculative_tokens, job.max_tokens), (head.folder, changed)
    groups = [engines.in_process(engines.measure, job.pair(folder), job.held_out, *sizes) for folder in heads]
    before, after = (sum_of(group).length for group in groups)
    paired = torch.tensor([b.length - a.length for a, b in zip(*groups, strict=True)])
    return before, after, float(paired.std() / len(paired) ** 0.5)


def write_sharpened(folder: Path, head: Head, selector: CandidateSelector) -> None:
    """The head as it is, its config with the selector_config, and the selector in a folder of its own."""
    assert head.folder is not None
    for file in head.folder.iterdir():  # but for what only training reads, in a checkpoint
        if file.is_file() and (file.name in head.weight_files or file.suffix not in (".safetensors", ".pt")):
            shutil.copyfile(file, folder / file.name)  # without its mode
    write_selector(folder, head, selector)
