"""Every drafter on a real target, SmolLM2-135M-Instruct: acceptance and speed on HumanEval and MT-Bench.

``make real-target`` first. Acceptance is of all prompts, 16 in flight, greedy; differences are paired by prompt. Then
the engines of all arms live at once, and answer one prompt after the other in turn, timed. Acceptance is kept, prompt
by prompt, in benchmarks/results/acceptance.jsonl and not measured again, unless arm, head, settings or device have
changed (remove it after a change of the drafting): a row names its commit. Tokens/s are measured each time.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
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
TIMED_PROMPTS, TIMED_TOKENS = 8, 64
IN_FLIGHT, REPEATS = (1, 4, 8), 3
RESAMPLES = 2000
THREADS = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
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
    def is_timed(self) -> bool:
        return self.k in TIMED_K.get(self.name, (0, 3))

    @property
    def target(self) -> Path:
        return TARGET

    @property
    def log(self) -> Path:
        WORK.mkdir(parents=True, exist_ok=True)
        return WORK / f"{self.label}.log"

    @property
    def env(self) -> dict[str, str]:
        """Its environment variables. This target is large enough for a thread on every core."""
        env = {"OMP_NUM_THREADS": THREADS, "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | arms.V1
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
        """What ``LLM`` is given. A head whose selector is off is written into ``WORK``."""
        if self.head is None:
            return None
        if self.head == "ngram":
            lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
            return {"method": "ngram", "num_speculative_tokens": self.k, **lookup}
        folder = HEADS / self.head
        source = read_head(folder)
        if SELECTOR in source.config and not self.selector:
            folder = WORK / str(self.digest())
            WORK.mkdir(parents=True, exist_ok=True)
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
# The K that are timed, of other drafters 3: all engines live at once, in 2.1 GB each.
TIMED_K = {"n-gram": (5,), "EAGLE-3": (2, 3), "P-EAGLE with look-up": (3, 5)}
NONE = RealArm("none")
DRAFTERS = [
    NONE,
    RealArm("n-gram", "ngram", 5),
    *(RealArm("EAGLE-3", "eagle3", k) for k in (2, 3, 7)),
    RealArm(f"{PLAIN}, stock vLLM", "peagle", 3, stock=True),
    *(RealArm(PLAIN, "peagle", k) for k in (3, 7)),
    *(RealArm("P-EAGLE", "peagle", k, selector=True) for k in (1, 2, 3, 5, 7)),
    *(RealArm("P-EAGLE with look-up", "peagle", k, selector=True, lookup=2) for k in (3, 5)),
]
ARMS = [arm for arm in DRAFTERS if arm.head in (None, "ngram") or (HEADS / arm.head).is_dir()]


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
    before = read_engine(engine.llm)
    outputs = engine.answer([turns[:1] for turns in read_set("humaneval")[:4]], 64)
    tokens, counts = sum(len(output.token_ids) for output in outputs), read_engine(engine.llm).since(before)
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

    def timed(self, name: str, only: slice) -> np.ndarray:
        """Tokens of answers to the first turns of some of a set's timed prompts at once, and their seconds, [2]."""
        chats, began = [turns[:1] for turns in read_set(name, TIMED_PROMPTS)[only]], time.perf_counter()
        tokens = sum(len(output.token_ids) for output in self.answer(chats, TIMED_TOKENS))
        return np.array([tokens, time.perf_counter() - began])

    def acceptance(self, first: dict[str, list[str]], prompts: int | None, **sampling: Any) -> dict[str, Any]:
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
    _engine.answer([["Hello"]] * 2, 8)  # to warm up


def _call(method: str | Callable[..., Any], *args: Any) -> Any:
    return method(_engine, *args) if callable(method) else getattr(_engine, method)(*args)


@contextmanager
def live(arm: RealArm) -> Iterator[Callable[..., Any]]:
    """A process with an arm's engine; ``call(method, *args)`` calls a method, or a function that takes the engine."""
    arm.speculative_config()  # writes the head here: processes of arms that share it would write it at once
    starting = {"initializer": _start, "initargs": (arm, os.getpid())}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **starting) as pool:
        with patch.dict(os.environ, arms.environment(arm.env), clear=True):
            pool.submit(int)  # the process starts here, with this environment

        def call(method: str | Callable[..., Any], *args: Any) -> Any:
            try:
                return pool.submit(_call, method, *args).result()
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


def acceptance(arm: RealArm, live_call: Callable[..., Any] | None, first: dict[str, list[str]]) -> dict[str, Any]:
    """``sets``, ``drafter`` and ``commit``, measured now or in an earlier run.

    Args:
        live_call: of the arm's engine, if it has one.
        first: see ``Engine.acceptance``.
    """
    facts, known = provenance(), asdict(arm) | {"head": arm.head and Path(arm.head).name}
    settings = {"arm": known, "digest": arm.digest(), "max_tokens": MAX_TOKENS, "engine": ENGINE}
    settings["device"] = facts["device"]
    rows = list(read_lines(KEPT, must_exist=False))
    if row := next((row for row in rows if row["settings"] == settings), None):
        return row
    with nullcontext(live_call) if live_call else live(arm) as call:
        row = {"settings": settings, "commit": facts["commit"], "drafter": call("__getattribute__", "drafter")}
        row["sets"] = call("acceptance", first, None)
    write_lines(KEPT, [*(other for other in rows if other["settings"]["arm"] != known), row])
    return row


def measure_all() -> dict[str, Any]:
    """The report: ``arms``, each with acceptance by set, and tokens/s by set and requests in flight."""
    cells: dict[RealArm, dict[str, Any]] = {}
    with ExitStack() as stack:
        calls = {arm: stack.enter_context(live(arm)) for arm in ARMS if arm.is_timed}
        for arm in ARMS:
            first = {name: cells[NONE]["sets"][name]["first"] for name in SETS} if NONE in cells else {}
            cells[arm] = acceptance(arm, calls.get(arm), first)
            print(arm.label, *(summarize(cells[arm]["sets"][name])["al"] for name in SETS), flush=True)
        for call in calls.values():
            call("prompt", ["Hello"])  # returns when the engine has started
        speeds = [measure_speeds(calls) for _ in range(REPEATS)]
    timed = {"prompts": TIMED_PROMPTS, "max_tokens": TIMED_TOKENS, "in_flight": IN_FLIGHT, "repeats": REPEATS}
    timed["threads"] = THREADS
    settings = {"engine": ENGINE, "max_tokens": MAX_TOKENS, "in_flight": MOST, "temperature": 0, "timed": timed}
    return {"settings": settings, "arms": [row_of(arm, cells, speeds) for arm in ARMS]}


Speeds = dict[RealArm, dict[tuple[str, int], float]]  # tokens/s by set and requests in flight


def measure_speeds(calls: dict[RealArm, Callable[..., Any]]) -> Speeds:
    """One repeat, of the arms' live engines: a prompt after the other, each answered by all arms in turn."""
    sums = {arm: {(name, n): np.zeros(2) for name in SETS for n in IN_FLIGHT} for arm in calls}
    for name, n in product(SETS, IN_FLIGHT):
        for at, (arm, call) in product(range(0, TIMED_PROMPTS, n), calls.items()):
            sums[arm][name, n] += call("timed", name, slice(at, at + n))
    return {arm: {key: tokens / seconds for key, (tokens, seconds) in sums[arm].items()} for arm in sums}


def row_of(arm: RealArm, cells: dict[RealArm, dict[str, Any]], speeds: list[Speeds]) -> dict[str, Any]:
    """What the result has of an arm."""
    bases = [base for base in compared_with(arm) if base in cells]
    sets = {}
    for name in SETS:
        counts = {a: np.asarray(cells[a]["sets"][name]["counts"]) for a in (arm, *bases)}
        sets[name] = summarize(cells[arm]["sets"][name])
        sets[name]["over"] = {base.name: gain_of(counts[arm], counts[base]) for base in bases}
        if arm.is_timed:
            times = {n: [speed[arm][name, n] for speed in speeds] for n in IN_FLIGHT}
            ratios = {n: [speed[arm][name, n] / speed[NONE][name, n] for speed in speeds] for n in IN_FLIGHT}
            sets[name]["tokens_per_second"] = {n: spread(samples) for n, samples in times.items()}
            sets[name]["times_no_speculation"] = {n: spread(samples) for n, samples in ratios.items()}
    return {"arm": asdict(arm), "sets": sets, "drafter": cells[arm]["drafter"], "commit": cells[arm]["commit"]}


def spread(samples: Iterable[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    return {name: value for name, value in arms.summary(samples).items() if name != "samples"}


def best_arms() -> list[dict[str, Any]]:
    """Of each drafter in the committed result the row with the K that is fastest with one request in flight."""

    def speed(row: dict[str, Any]) -> float:
        return sum(row["sets"][name]["times_no_speculation"]["1"]["median"] for name in SETS)

    rows = json.loads(RESULT.read_text())["arms"]
    timed = [row for row in rows if "times_no_speculation" in row["sets"][SETS[0]]]
    names = dict.fromkeys(row["arm"]["name"] for row in timed)
    return [max((row for row in timed if row["arm"]["name"] == name), key=speed) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT, help="the result's file (default: %(default)s)")
    out, facts = parser.parse_args().out, provenance()
    report = {"what": str(__doc__).splitlines()[0], **measure_all(), **facts}
    write_whole(out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
