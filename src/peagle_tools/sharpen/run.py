"""The whole of ``peagle-vllm sharpen``: record, fit, measure, write. Every step that is finished stays."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peagle_kernels import CandidateSelector
from peagle_tools.shared import engines
from peagle_tools.shared.acceptance import Acceptance
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.files import new_folder, write_whole
from peagle_tools.shared.selector_file import read_selector, write_selector
from peagle_tools.sharpen import fit, record
from peagle_tools.sharpen.prompts import Prompts
from peagle_tools.sharpen.trace import CandidateTrace, Gain
from peagle_vllm.heads import selector as files
from peagle_vllm.heads.convert import write_json
from peagle_vllm.heads.files import SELECTOR_FOLDER, one_line, read_json
from peagle_vllm.heads.head import Head, read_map

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


def sharpen(
    head: Head,
    target: str,
    vocab_size: int,
    prompts: Prompts,
    out: Path,
    plan: Plan,
    progress: Progress,
) -> Sharpened:
    """Fit a selector to ``head`` and write the sharpened head to ``out`` when it drafts better.

    Args:
        vocab_size: of the target.

    Raises:
        ToolError: one line; what was recorded stays in a folder beside ``out``, and the next call goes on from there.
    """
    refuse_too_few(prompts)
    assert head.folder is not None
    pair = engines.Pair(target, str(head.folder), plan.arguments)
    with work_folder(out, head, target, prompts, plan) as work:
        trace = recorded(pair, prompts, work, plan, progress)
        offsets, sizes = _offsets(head), (vocab_size, head.draft_vocab_size)
        own = read_selector(head)
        if own and (own.predecessor_codebook.shape[1], own.num_candidates) != (plan.rank, plan.num_candidates):
            own = None  # others were asked for
        fitted = _fitted(trace, sizes, offsets, plan, progress, own)
        best = max(fitted, key=lambda one: one.gain.length)
        sharpened = work / "sharpened"
        shutil.rmtree(sharpened, ignore_errors=True)
        sharpened.mkdir()
        write_sharpened(sharpened, head, best.selector)
        measured = served(pair, sharpened, prompts, plan, progress)
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
def work_folder(out: Path, head: Head, target: str, prompts: Prompts, plan: Plan) -> Iterator[Path]:
    """A folder beside ``out`` for what is recorded; removed at the end, kept on any error."""
    if out.exists():
        raise ToolError(f"{out} exists; name a folder that does not, nothing is overwritten")
    work = out.parent / f".{out.name}.sharpen"
    asked = {
        "head": files.head_hash(head),
        "target": target,
        "prompts": hashlib.sha256(json.dumps(prompts.learn).encode()).hexdigest(),
        **asdict(plan),
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
        raise ToolError(f"{work} cannot be written ({one_line(error.strerror or error)}); {record.GO_ON}") from None
    shutil.rmtree(work, ignore_errors=True)


def recorded(pair: engines.Pair, prompts: Prompts, work: Path, plan: Plan, progress: Progress) -> CandidateTrace:
    """The target's answers beside what the head proposed; those in ``work`` already are not asked for again."""
    wanted = [file for file, _ in record.shards(prompts.learn, work)]
    with ThreadPoolExecutor(1) as thread:
        numbers = plan.num_speculative_tokens, plan.num_candidates, plan.max_tokens
        running = thread.submit(engines.in_process, record.record_all, pair, prompts.learn, work, *numbers)
        while not running.done():
            progress("record", sum(file.exists() for file in wanted), len(wanted))
            try:
                running.result(timeout=1)
            except TimeoutError:
                continue
        running.result()
    return CandidateTrace.joined([CandidateTrace.load(file) for file in wanted])


def _fitted(
    trace: CandidateTrace,
    sizes: tuple[int, int],
    offsets: torch.Tensor | None,
    plan: Plan,
    progress: Progress,
    own: CandidateSelector | None,
) -> list[fit.Fitted]:
    """The best selector of each form."""
    learned, held = trace.divided()
    if not len(learned.ids) or not len(held.ids):
        raise ToolError(f"{len(trace.ids)} drafts in all of the target's answers; ask for longer ones (--max-tokens)")
    batches, forms = itertools.count(1), (fit.OWN,) if own else fit.FORMS
    total = len(forms) * fit.num_batches(len(learned.ids))

    def on_batch() -> None:
        progress("fit", next(batches), total)

    return [fit.fit(form, learned, held, sizes, plan.rank, offsets, on_batch, own) for form in forms]


def served(pair: engines.Pair, sharpened: Path, prompts: Prompts, plan: Plan, progress: Progress) -> list[ServedGain]:
    """What ``sharpened`` gains over the pair's own head, by K."""
    found = []
    depths = sorted({k for k in MEASURED if k < plan.num_speculative_tokens} | {plan.num_speculative_tokens})
    for number, k in enumerate(depths):
        seen: list[list[Acceptance]] = []
        for at, head in enumerate((pair.head, str(sharpened))):
            progress("measure", 2 * number + at, 2 * len(depths))
            measured = engines.Pair(pair.target, head, pair.arguments)
            seen.append(engines.in_process(engines.measure, measured, prompts.held_out, k, plan.max_tokens))
        before, after = (
            Gain.over(*torch.tensor([(group.num_accepted, group.num_drafts) for group in groups]).T) for groups in seen
        )
        paired = torch.tensor([b.length - a.length for a, b in zip(*seen, strict=True)])
        error = float(paired.std() / len(paired) ** 0.5) if len(paired) > 1 else float("inf")
        found.append(ServedGain(k, before, after, Gain(after.length - before.length, error)))
    return found


def _offsets(head: Head) -> torch.Tensor | None:
    targets = read_map(head).target_ids
    return None if targets is None else torch.from_numpy(targets) - torch.arange(len(targets))


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
