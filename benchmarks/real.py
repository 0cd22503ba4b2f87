"""Every drafter on a real target, SmolLM2-135M-Instruct: acceptance on HumanEval and MT-Bench.

``make real-target`` first. All prompts, 16 in flight, greedy; differences are paired by prompt. What is measured is
kept, prompt by prompt, in benchmarks/results/acceptance.jsonl, and not measured again unless arm, head, settings or
device have changed (remove it after a change of the drafting): a row names its commit.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import arms
from benchmarks.arms import ROOT
from benchmarks.engine import drafter_of, prepare_process
from peagle_tools.shared.acceptance import read_engine
from peagle_tools.shared.atomic_files import new_folder, write_whole
from peagle_tools.shared.engines import quick_dtype
from peagle_tools.shared.processes import end_with_parent
from peagle_tools.shared.prompt_files import read_conversations
from peagle_tools.shared.provenance import provenance
from peagle_tools.train.lines import read_lines, write_lines
from peagle_tools.train.peagle_yaml import ends_in_loop
from peagle_vllm.heads import convert as converting
from peagle_vllm.heads.files import SELECTOR
from peagle_vllm.heads.head import read_head

TARGET, HEADS = ROOT / ".cache/real-target", ROOT / "models/real"
PROMPTS = ROOT / ".cache/real-prompts"
WORK, RESULT = ROOT / ".cache/real-bench", ROOT / "benchmarks/results/real.json"
KEPT = RESULT.with_name("acceptance.jsonl")
SETS = ("humaneval", "mt-bench")
MAX_TOKENS = {"humaneval": 128, "mt-bench": 256}  # of an answer
MOST = 16  # requests in flight where acceptance is measured
RESAMPLES = 2000
ENGINE = {"dtype": quick_dtype(), "max_num_seqs": MOST, "kv_cache_memory_bytes": 384 << 20}


@dataclass(frozen=True)
class RealArm:
    """A drafter."""

    name: str
    head: str | None = None  # a folder, of models/real if it is a name ("eagle3": what speculators trained), or "ngram"
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
    def log(self) -> Path:
        return WORK / f"{self.label}.log"

    @property
    def env(self) -> dict[str, str]:
        """Its environment variables. This target is large enough for a thread on every core."""
        threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        env = {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | arms.V1
        return env | (arms.STOCK if self.stock else {})

    def digest(self) -> str | None:
        """SHA-256 of the weights of head and selector, shortened; None without a head."""
        if self.head in (None, "ngram"):
            return None
        files = sorted((HEADS / self.head).rglob("*.safetensors"))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]

    @property
    def engine(self) -> dict[str, Any]:
        """What ``LLM`` is given, besides the two models."""
        return {"max_model_len": 2048, "enable_prefix_caching": False, **ENGINE}

    def speculative_config(self) -> dict[str, Any] | None:
        """What ``LLM`` is given. A head whose selector is off is written into ``WORK``, which exists."""
        if self.head is None:
            return None
        if self.head == "ngram":
            lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
            return {"method": "ngram", "num_speculative_tokens": self.k, **lookup}
        folder = HEADS / self.head
        source = read_head(folder)
        if SELECTOR in source.config and not self.selector:
            folder = WORK / str(self.digest())
            if not folder.is_dir():
                config = {key: value for key, value in source.config.items() if key != SELECTOR}
                with new_folder(folder) as out:
                    converting.convert(replace(source, config=config), out, "speculators", None)
        config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": self.k}
        parallel = not Path(self.head).name.endswith("eagle3")
        config |= {"parallel_drafting": True} if parallel else {}
        config |= {"prompt_lookup_min": self.lookup} if parallel and not self.stock else {}
        return config | ({"draft_sample_method": "probabilistic"} if self.probabilistic else {})


PLAIN = "P-EAGLE without selector"  # the same head, with its selector turned off
NONE = RealArm("none")
ARMS = [
    NONE,
    RealArm("n-gram", "ngram", 5),
    *(RealArm("EAGLE-3", "eagle3", k) for k in (2, 3, 7)),
    RealArm(f"{PLAIN}, stock vLLM", "peagle", 3, stock=True),
    *(RealArm(PLAIN, "peagle", k) for k in (3, 7)),
    *(RealArm("P-EAGLE", "peagle", k, selector=True) for k in (1, 2, 3, 5, 7)),
    *(RealArm("P-EAGLE with look-up", "peagle", k, selector=True, lookup=2) for k in (3, 5)),
]


def read_set(name: str, prompts: int | None = None) -> list[list[str]]:
    """The user's turns of every prompt of a set, or of ``prompts`` of them, spread over the set."""
    chats = read_conversations(PROMPTS / f"{name}.jsonl")
    if prompts:
        chats = chats[:: max(1, len(chats) // prompts)][:prompts]
    return [[message["content"] for message in messages] for messages in chats]


@dataclass(frozen=True)
class RecordedArm(RealArm):
    """What training.json of a head records is measured with."""

    @property
    def env(self) -> dict[str, str]:
        return super().env | {"OMP_NUM_THREADS": "1"}

    @property
    def engine(self) -> dict[str, Any]:
        eager = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 4}
        return super().engine | eager


def greedy_drafts(head: Path) -> dict[str, Any]:
    """What a head's training.json records: four answers of 64 tokens, K = 7, in float32."""
    with live(RecordedArm("recorded", str(head), 7, selector=True)) as call:
        return call(_recorded)


def _recorded(engine: "Engine") -> dict[str, Any]:
    outputs = engine.answer([turns[:1] for turns in read_set("humaneval")[:4]], 64)
    tokens, counts = sum(len(output.token_ids) for output in outputs), read_engine(engine.llm)
    return {"output_tokens": tokens, "acceptance_length": counts.length, "acceptance": list(counts.shares)}


# ------------------------------------------------------------------------------------- in an arm's own process


class Engine:
    """A live engine of an arm, in this process."""

    def __init__(self, arm: RealArm):
        prepare_process()
        from vllm import LLM

        config = arm.speculative_config()
        counted = {"per_request_spec_decode_metrics": "summary", "disable_log_stats": False} if config else {}
        self.arm, self.llm = arm, LLM(str(arm.target), speculative_config=config, **arm.engine, **counted)
        drafter = drafter_of(self.llm)
        self.drafter = type(drafter).__name__ if drafter else "none"

    def answer(self, chats: list[list[str]], max_tokens: int, **sampling: Any) -> list[Any]:
        """An answer to each chat, up to ``max_num_seqs`` of them in flight; greedy, unless ``sampling`` says more."""
        from vllm import SamplingParams

        how = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})
        outputs = self.llm.generate([self.prompt(chat) for chat in chats], how, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    def prompt(self, chat: list[str]) -> dict[str, Any]:
        """The turns of a chat in the target's template; the user's comes first."""
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(chat)]
        template = self.llm.get_tokenizer().apply_chat_template
        return {"prompt_token_ids": template(turns, add_generation_prompt=True, return_dict=False)}

    def counts(self, output: Any) -> list[int]:
        """In how many steps after the prefill 0, 1 .. K drafts of an answer were accepted, [K + 1]."""
        metrics = output.spec_decode_metrics
        counts = list(metrics.histogram) if metrics else [0] * (self.arm.k + 1)
        if self.arm.head == "ngram":  # vLLM counts steps with drafts; those of a head have some always
            accepted = sum(number * steps for number, steps in enumerate(counts))
            counts[0] += max(0, len(output.token_ids) - 1 - accepted - sum(counts))
        return counts

    def acceptance(self, first: dict[str, list[str]], prompts: int | None = None, **sampling: Any) -> dict[str, Any]:
        """Acceptance on all prompts, or some of each set.

        Args:
            first: by set, the answers to first turns that second turns follow; none: this arm's own.
            sampling: of the requests, in place of ``MAX_TOKENS`` and greedy.

        Returns:
            By set, for each prompt, the ``counts`` of its turns added up, their tokens, and whether one ends in a
            loop; ``first``: this arm's own answers that second turns followed.
        """
        sets = {}
        for name in SETS:
            turns = read_set(name, prompts)
            answers, sums = first.get(name, []), np.zeros((len(turns), self.arm.k + 1), dtype=int)
            tokens, loops = np.zeros(len(turns), dtype=int), np.zeros(len(turns), dtype=bool)
            for number in range(len(turns[0])):
                chats = [words[:1] for words in turns]
                if number:
                    chats = [[words[0], answer, words[1]] for words, answer in zip(turns, answers, strict=True)]
                outputs = self.answer(chats, **{"max_tokens": MAX_TOKENS[name], **sampling})
                answers = answers or [output.text for output in outputs]
                sums += [self.counts(output) for output in outputs]
                tokens += [len(output.token_ids) for output in outputs]
                loops |= [ends_in_loop(list(output.token_ids)) for output in outputs]
            sets[name] = {"counts": sums.tolist(), "tokens": tokens.tolist(), "loops": loops.tolist()}
            sets[name]["first"] = [] if first.get(name) or len(turns[0]) == 1 else answers
        return sets


_engine: Engine


def _start(arm: RealArm, parent: int) -> None:
    """Start the engine of this process, which ends with ``parent``. What the process logs goes to ``arm.log``."""
    global _engine
    end_with_parent(parent)
    with arm.log.open("w") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    _engine = Engine(arm)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(_engine, *args)


@contextmanager
def live(arm: RealArm) -> Iterator[Callable[..., Any]]:
    """A process with an arm's engine; ``call(function, *args)`` is ``function(engine, *args)`` in it."""
    WORK.mkdir(parents=True, exist_ok=True)
    starting = {"initializer": _start, "initargs": (arm, os.getpid())}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **starting) as pool:
        with patch.dict(os.environ, arms.environment(arm.env), clear=True):
            pool.submit(int)  # the process starts here, with this environment

        def call(function: Callable[..., Any], *args: Any) -> Any:
            try:
                return pool.submit(_call, function, *args).result()
            except BrokenProcessPool:
                raise SystemExit(f"{arm.label}: its process ended; see {arm.log}") from None

        yield call


# --------------------------------------------------------------------------------------------------- figures


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


def summarize(cell: dict[str, Any]) -> dict[str, Any]:
    """Acceptance of a set with 95% intervals; ``KEPT`` has the counts by prompt and position."""
    counts = np.asarray(cell["counts"])
    looping = np.asarray(cell["loops"])
    return {
        **al_of(counts),
        "al_of_prompts_that_do_not_loop": round(float(lengths(counts[~looping].sum(0))), 4),
        "prompts": len(counts),
        "prompts_that_loop": int(looping.sum()),
    }


def compared_with(arm: RealArm) -> list[RealArm]:
    """At the same K: look-up with the head's own drafts, a selector with the head without it, both with EAGLE-3."""
    joint = RealArm("P-EAGLE", "peagle", arm.k, selector=True)
    plain, eagle3 = RealArm(PLAIN, "peagle", arm.k), RealArm("EAGLE-3", "eagle3", arm.k)
    if arm.lookup:
        return [joint]
    return {joint: [plain, eagle3], plain: [eagle3]}.get(arm, [])


def acceptance(arm: RealArm, first: dict[str, list[str]]) -> dict[str, Any]:
    """``sets``, ``drafter`` and ``commit``, measured now or in an earlier run; ``first``: see ``Engine.acceptance``."""
    facts = provenance()
    settings = {"arm": asdict(arm), "digest": arm.digest(), "max_tokens": MAX_TOKENS, "engine": ENGINE}
    settings["device"] = facts["device"]
    rows = list(read_lines(KEPT, must_exist=False))
    if row := next((row for row in rows if row["settings"] == settings), None):
        return row
    with live(arm) as call:
        row = {"settings": settings, "commit": facts["commit"], **call(_measured, first)}
    write_lines(KEPT, [*(other for other in rows if other["settings"]["arm"] != settings["arm"]), row])
    return row


def _measured(engine: Engine, first: dict[str, list[str]]) -> dict[str, Any]:
    return {"drafter": engine.drafter, "sets": engine.acceptance(first)}


def measure_all() -> dict[str, Any]:
    """The report: ``arms``, each with acceptance by set."""
    measured: dict[RealArm, dict[str, Any]] = {}
    first: dict[str, list[str]] = {}
    for arm in ARMS:
        measured[arm] = acceptance(arm, first)
        first = first or {name: measured[arm]["sets"][name]["first"] for name in SETS}
        print(arm.label, *(summarize(measured[arm]["sets"][name])["al"] for name in SETS), flush=True)
    settings = {"engine": ENGINE, "max_tokens": MAX_TOKENS, "in_flight": MOST, "temperature": 0}
    return {"settings": settings, "arms": [row_of(arm, measured) for arm in ARMS]}


def row_of(arm: RealArm, measured: dict[RealArm, dict[str, Any]]) -> dict[str, Any]:
    """What the result has of an arm."""
    bases = [base for base in compared_with(arm) if base in measured]
    sets = {}
    for name in SETS:
        counts = {a: np.asarray(measured[a]["sets"][name]["counts"]) for a in (arm, *bases)}
        sets[name] = summarize(measured[arm]["sets"][name])
        sets[name]["over"] = {base.name: gain_of(counts[arm], counts[base]) for base in bases}
    return {"arm": asdict(arm), "sets": sets, "drafter": measured[arm]["drafter"], "commit": measured[arm]["commit"]}


def as_text(report: dict[str, Any]) -> str:
    """JSON with a line for each key, and for each arm."""
    arms_of = ",\n  ".join(map(json.dumps, report["arms"]))
    texts = {key: json.dumps(value) for key, value in report.items()} | {"arms": f"[\n  {arms_of}\n ]"}
    return "{\n" + ",\n".join(f' "{key}": {text}' for key, text in texts.items()) + "\n}\n"


def committed() -> dict[str, dict[str, Any]]:
    """Acceptance by set in the committed result, by the arm's label."""
    return {RealArm(**row["arm"]).label: row["sets"] for row in json.loads(RESULT.read_text())["arms"]}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    report = {"what": str(__doc__).splitlines()[0], **measure_all(), **provenance()}
    write_whole(RESULT, as_text(report))


if __name__ == "__main__":
    main()
