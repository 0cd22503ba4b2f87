"""Every drafter on a real target, SmolLM2-135M-Instruct: acceptance on HumanEval and MT-Bench.

``make real-target`` first. All prompts, 16 in flight, greedy; differences are paired by prompt. What is measured is
kept, prompt by prompt, in benchmarks/results/acceptance.jsonl, and not measured again unless its row is removed; a row
names its commit.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import arms
from benchmarks.arms import ROOT
from benchmarks.engine import drafter_of, prepare_process
from peagle_tools.shared.acceptance import read_engine
from peagle_tools.shared.atomic_files import new_folder
from peagle_tools.shared.engines import generate, in_process, quick_dtype
from peagle_tools.shared.prompt_files import read_conversations
from peagle_tools.shared.provenance import provenance
from peagle_tools.train.lines import add_line, read_lines
from peagle_tools.train.peagle_yaml import ends_in_loop
from peagle_vllm.heads import convert as converting
from peagle_vllm.heads.files import SELECTOR
from peagle_vllm.heads.head import read_head

TARGET, HEADS = ROOT / ".cache/real-target", ROOT / "models/real"
PROMPTS = ROOT / ".cache/real-prompts"
WORK, KEPT = ROOT / ".cache/real-bench", ROOT / "benchmarks/results/acceptance.jsonl"
SETS = ("humaneval", "mt-bench")
MAX_TOKENS = {"humaneval": 128, "mt-bench": 256}  # of an answer
RESAMPLES = 2000
# Up to so many requests are in flight where acceptance is measured.
ENGINE = {"dtype": quick_dtype(), "max_num_seqs": 16, "kv_cache_memory_bytes": 384 << 20}


@dataclass(frozen=True)
class RealArm:
    name: str
    head: str | None = None  # a folder, of models/real if it is a name, or "ngram"
    k: int = 0
    selector: bool = False
    stock: bool = False
    probabilistic: bool = False  # its drafts for requests with a temperature are sampled
    lookup: int = 0  # tokens from which on drafts are looked up; 0: never

    @property
    def label(self) -> str:
        return f"{self.name} K={self.k}" if self.k else self.name

    @property
    def target(self) -> Path:
        return TARGET

    @property
    def folder(self) -> Path | None:
        return HEADS / self.head if self.head not in (None, "ngram") else None

    @property
    def env(self) -> dict[str, str]:
        """Its environment variables. This target is large enough for a thread on every core."""
        threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        env = {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | arms.V1
        return env | (arms.STOCK if self.stock else {})

    @property
    def engine(self) -> dict[str, Any]:
        """What ``LLM`` is given, besides the two models."""
        return {"max_model_len": 2048, "enable_prefix_caching": False, **ENGINE}

    def check(self) -> None:
        """Raises SystemExit, with one line, where a model or the prompts are missing."""
        for folder in filter(None, (self.target, PROMPTS, self.folder)):
            if not folder.is_dir():
                name = os.path.relpath(folder, ROOT)
                raise SystemExit(f"{name} is not here: `make real-target`, or carry it along")

    def speculative_config(self) -> dict[str, Any] | None:
        """What ``LLM`` is given. A head whose selector is off is written into ``WORK``, which exists."""
        if self.head == "ngram":
            lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
            return {"method": "ngram", "num_speculative_tokens": self.k, **lookup}
        if (folder := self.folder) is None:
            return None
        source = read_head(folder)
        if SELECTOR in source.config and not self.selector:
            folder = WORK / "without selector"
            shutil.rmtree(folder, ignore_errors=True)
            config = {key: value for key, value in source.config.items() if key != SELECTOR}
            with new_folder(folder) as out:
                converting.convert(replace(source, config=config), out, "speculators", None)
        config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": self.k}
        if source.kind == "peagle":
            config |= {"parallel_drafting": True} | ({} if self.stock else {"prompt_lookup_min": self.lookup})
        return config | ({"draft_sample_method": "probabilistic"} if self.probabilistic else {})


PLAIN = "P-EAGLE without selector"  # the same head, with its selector turned off
NONE = RealArm("none")
ARMS = [
    NONE,
    RealArm("n-gram", "ngram", 5),
    *(RealArm("EAGLE-3", "eagle3", k) for k in (2, 3, 7)),
    *(RealArm(PLAIN, "peagle", k) for k in (3, 7)),
    *(RealArm("P-EAGLE", "peagle", k, selector=True) for k in (3, 7)),
    *(RealArm("P-EAGLE with look-up", "peagle", k, selector=True, lookup=2) for k in (3, 7)),
]


def read_set(name: str, prompts: int | None = None) -> list[list[str]]:
    """The user's turns of every prompt of a set, or of ``prompts`` of them."""
    chats = spread(read_conversations(PROMPTS / f"{name}.jsonl"), prompts)
    return [[message["content"] for message in messages] for messages in chats]


def spread(rows: list[Any], number: int | None) -> list[Any]:
    """All ``rows``, or ``number`` of them from everywhere."""
    return rows[:: max(1, len(rows) // number)][:number] if number else rows


def first_answers() -> dict[str, list[str]]:
    """By set, the answers to first turns that every arm's second turns follow: the kept ones, without a drafter."""
    rows = read_lines(KEPT, must_exist=False)
    sets = next((row["sets"] for row in rows if row["settings"]["arm"]["name"] == NONE.name), {})
    return {name: sets[name]["first"] for name in sets}


class Engine:
    """A live engine of an arm, in this process, with more arguments of ``LLM``."""

    def __init__(self, arm: RealArm, **more: Any):
        arm.check()
        prepare_process()
        from vllm import LLM

        config = arm.speculative_config()
        counted = {"per_request_spec_decode_metrics": "summary", "disable_log_stats": False} if config else {}
        self.arm, self.llm = arm, LLM(str(arm.target), speculative_config=config, **arm.engine | counted | more)
        self.drafter = type(drafter_of(self.llm)).__name__

    def answer(self, chats: list[list[str]], max_tokens: int, **sampling: Any) -> list[Any]:
        """An answer to each chat, up to ``max_num_seqs`` of them in flight; greedy, unless ``sampling`` says more."""
        roles = ("user", "assistant", "user")
        turns = [[{"role": role, "content": text} for role, text in zip(roles, chat, strict=False)] for chat in chats]
        template = self.llm.get_tokenizer().apply_chat_template
        prompts = template(turns, add_generation_prompt=True, return_dict=False)
        return [output.outputs[0] for output in generate(self.llm, prompts, max_tokens, **sampling)]

    def counts(self, output: Any) -> list[int]:
        """In how many steps after the prefill 0, 1 .. K drafts of an answer were accepted, [K + 1]."""
        metrics = output.spec_decode_metrics
        counts = list(metrics.histogram) if metrics else [0] * (self.arm.k + 1)
        if self.arm.head == "ngram":  # vLLM counts steps with drafts; those of a head have some always
            accepted = sum(number * steps for number, steps in enumerate(counts))
            counts[0] += max(0, len(output.token_ids) - 1 - accepted - sum(counts))
        return counts

    def acceptance(self, prompts: int | None = None, **sampling: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Acceptance on all prompts, or some of each set; ``sampling`` may differ from ``MAX_TOKENS`` and greedy.

        Yields:
            A set, and for each prompt of it the ``counts`` of its turns added up, their tokens, and whether one ends in
            a loop; ``first``: this arm's own answers that second turns followed, where ``first_answers`` has none.
        """
        for name in SETS:
            turns, how = read_set(name, prompts), {"max_tokens": MAX_TOKENS[name], **sampling}
            rounds, replies = [self.answer([words[:1] for words in turns], **how)], []
            if len(turns[0]) == 2:
                if not (answers := spread(first_answers().get(name, []), prompts)):
                    answers = replies = [output.text for output in rounds[0]]
                pairs = zip(turns, answers, strict=True)
                rounds.append(self.answer([[begin, answer, end] for (begin, end), answer in pairs], **how))
            of_prompts = [*zip(*rounds, strict=True)]
            cell = {
                "counts": [np.sum([self.counts(o) for o in outputs], 0).tolist() for outputs in of_prompts],
                "tokens": [sum(len(o.token_ids) for o in outputs) for outputs in of_prompts],
                "loops": [any(ends_in_loop(list(o.token_ids)) for o in outputs) for outputs in of_prompts],
                "first": replies,
            }
            yield name, cell

    def speed(self, name: str, c: int, number: int, max_tokens: int, **sampling: Any) -> float:
        """Tokens a second of answers to ``number`` of a set's first turns, ``c`` at once."""
        prompts = read_set(name, number)
        chats = [prompts[at % len(prompts)][:1] for at in range(number)]
        tokens, began = 0, time.perf_counter()
        for at in range(0, number, c):
            tokens += sum(len(output.token_ids) for output in self.answer(chats[at : at + c], max_tokens, **sampling))
        return tokens / (time.perf_counter() - began)


def in_own_process(task: Callable[..., Any], arm: RealArm, *args: Any, **more: Any) -> Any:
    """``task(engine, *args)`` in a process of its own, whose log is in ``WORK``; ``more`` are arguments of ``LLM``."""
    WORK.mkdir(parents=True, exist_ok=True)
    with patch.dict(os.environ, arms.environment(arm.env), clear=True):
        return in_process(_with_engine, task, arm, args, more)


def _with_engine(task: Callable[..., Any], arm: RealArm, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    with (WORK / f"{arm.label}.log").open("w") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    return task(Engine(arm, **more), *args)


def greedy_drafts(head: Path) -> dict[str, Any]:
    """What a head's training.json records: four answers of 64 tokens, K = 7, in float32."""
    arm = RealArm("recorded", str(head), 7, selector=True)
    eager = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 4}
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):
        return in_own_process(_recorded, arm, **eager)


def _recorded(engine: Engine) -> dict[str, Any]:
    outputs = engine.answer([turns[:1] for turns in read_set("humaneval")[:4]], 64)
    tokens, counts = sum(len(output.token_ids) for output in outputs), read_engine(engine.llm)
    return {"output_tokens": tokens, "acceptance_length": counts.length, "acceptance": list(counts.shares)}


def lengths(counts: np.ndarray) -> np.ndarray:
    """Acceptance length of ``counts`` summed over prompts, [..., K + 1] -> [...]."""
    return 1 + counts @ np.arange(counts.shape[-1]) / np.maximum(counts.sum(-1), 1)


def resampled(counts: np.ndarray) -> np.ndarray:
    """``counts`` [n, K + 1] summed over prompts drawn with replacement, the same for every arm, [RESAMPLES, K + 1]."""
    drawn = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    return counts[drawn].sum(1)


def interval(samples: np.ndarray) -> list[float]:
    """The central 95% of ``samples``."""
    return [round(float(edge), 4) for edge in np.percentile(samples, (2.5, 97.5))]


def al_of(counts: np.ndarray) -> dict[str, Any]:
    """Acceptance length over all prompts, [n, K + 1], and its 95% interval."""
    return {"al": round(float(lengths(counts.sum(0))), 4), "al_95": interval(lengths(resampled(counts)))}


def gain_of(counts: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """How much larger the acceptance length of ``counts`` is than that of ``other`` on the same prompts, relative."""
    ratio = lengths(resampled(counts)) / lengths(resampled(other))
    return {"gain": round(float(lengths(counts.sum(0)) / lengths(other.sum(0)) - 1), 4), "gain_95": interval(ratio - 1)}


def summarize(cell: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    """Acceptance of a set, and its gain over that of another arm, with 95% intervals."""
    counts, looping = np.asarray(cell["counts"]), np.asarray(cell["loops"])
    unlooped = {"al_of_prompts_that_do_not_loop": round(float(lengths(counts[~looping].sum(0))), 4)}
    return {**al_of(counts), **unlooped, **(gain_of(counts, np.asarray(base["counts"])) if base else {})}


@cache
def committed() -> dict[str, dict[str, Any]]:
    """Acceptance by set of what is kept, by the arm's label."""
    kept = {RealArm(**row["settings"]["arm"]): row["sets"] for row in read_lines(KEPT)}
    figures = {}
    for arm, sets in kept.items():
        # At the same K: the head's own drafts for look-up, the head without its selector for that.
        other = replace(arm, name="P-EAGLE", lookup=0) if arm.lookup else replace(arm, name=PLAIN, selector=False)
        base = kept.get(other, {}) if arm.head == "peagle" and arm.selector else {}
        figures[arm.label] = {name: summarize(sets[name], base.get(name)) for name in SETS}
    return figures


def acceptance(arm: RealArm) -> dict[str, Any]:
    """Acceptance by set, measured now or in an earlier run."""
    for row in read_lines(KEPT, must_exist=False):
        if row["settings"]["arm"] == asdict(arm):
            return row["sets"]
    settings = {"arm": asdict(arm), "max_tokens": MAX_TOKENS, "engine": ENGINE}
    row = {"settings": settings, **provenance(), **in_own_process(_measured, arm)}
    add_line(KEPT, row)
    return row["sets"]


def _measured(engine: Engine) -> dict[str, Any]:
    return {"drafter": engine.drafter, "sets": dict(engine.acceptance())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    labels = [arm.label for arm in ARMS]
    about = "measure this drafter only; may be repeated"
    parser.add_argument("--only", action="append", choices=labels, metavar="ARM", help=about)
    chosen = parser.parse_args().only or labels
    for arm in (arm for arm in ARMS if arm.label in chosen):
        sets = acceptance(arm)
        print(arm.label, *(al_of(np.asarray(sets[name]["counts"]))["al"] for name in SETS), flush=True)


if __name__ == "__main__":
    main()
