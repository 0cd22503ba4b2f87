"""The drafters of ``benchmarks.real`` on a GPU, as a user gets them: parts of ``benchmarks.gpu_day``.

bfloat16, vLLM's default compilation, Model Runner V2 but for stock P-EAGLE. One start an arm: acceptance on all
prompts, while other arms start; then, alone, tokens/s at every concurrency. A server and ``vllm bench serve`` give the
latencies at one request rate. Without a GPU: tiny models, eager, some prompts.
"""

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arms, turns
from benchmarks.arms import HAS_GPU, SLOWER
from benchmarks.real import KEPT, NONE, PROMPTS, SETS, TARGET, Engine, RealArm, al_of, committed, read_set
from peagle_tools.train.lines import read_lines

MODELS = arms.ROOT / "models"
HEADS = ("peagle", "eagle3") if HAS_GPU else (f"{MODELS}/tiny-llama-peagle-sharp", f"{MODELS}/tiny-llama-eagle3")
BATCHES = (1, 64, 8, 32, 128) if HAS_GPU else (1, 2)
MOST = max(BATCHES)  # requests that an engine runs
# Small enough for ten engines on a GPU; no size that profiling finds, which forbids others to allocate meanwhile.
ENGINE: dict[str, Any] = (
    {"dtype": "bfloat16", "kv_cache_memory_bytes": 3 << 30, "gpu_memory_utilization": 0.1}
    if HAS_GPU
    else {"dtype": "float32", "kv_cache_memory_bytes": 128 << 20, "enforce_eager": True}
)
REPEATS, TIMED_PROMPTS, TIMED_TOKENS = (3, 8, 64) if HAS_GPU else (1, 1, 8)  # at least so many prompts
LESS: dict[str, Any] = {} if HAS_GPU else {"max_tokens": 8}  # of an answer whose acceptance is measured
PART_OF_A_SET = None if HAS_GPU else 2  # prompts whose acceptance is measured; None: all
START_SECONDS, TIMED_SECONDS = 210 * SLOWER, 60 * SLOWER  # the limits of an arm's two stages
RATE, REQUESTS = (32, 160) if HAS_GPU else (4, 4)  # of the server: requests a second, and in all
ANSWER = 128 if HAS_GPU else 8  # tokens
PERCENTILES = ("p50_ttft", "p99_ttft", "p50_tpot")  # of what ``vllm bench serve`` reports
TEMPERATURES = (0.7, 1.0)
ADAPTIVE = ("enable_adaptive_verification", True)  # vLLM verifies only the drafts that pay
# More draft tokens for few requests than for many: [first batch size, last, K].
BY_BATCH_SIZE = ("num_speculative_tokens_per_batch_size", [[1, 8, 5], [9, 32, 3], [33, 128, 1]])


@dataclass(frozen=True)
class GpuArm(RealArm):
    """A drafter of ``benchmarks.real`` on this machine's device."""

    v1: bool = False  # its runner
    speculative: tuple[str, Any] | None = None  # one more entry of its speculative config
    largest_graph: int | None = None  # rows; None: vLLM's choice
    batches: tuple[int, ...] = BATCHES  # at which it is timed

    @property
    def target(self) -> Path:
        return TARGET if HAS_GPU else MODELS / "tiny-llama"

    @property
    def env(self) -> dict[str, str]:
        one_thread = {"OMP_NUM_THREADS": "1"}  # as vLLM does on a GPU by itself; many engines start at the same time
        return super().env | one_thread | (arms.V1 if self.v1 else arms.V2)

    @property
    def engine(self) -> dict[str, Any]:
        graphs = {"max_cudagraph_capture_size": self.largest_graph} if self.largest_graph else {}
        return super().engine | ENGINE | {"max_num_seqs": MOST} | graphs

    def speculative_config(self) -> dict[str, Any] | None:
        config = super().speculative_config()
        return config | dict([self.speculative]) if config and self.speculative else config


def p_eagle(name: str, k: int, **more: Any) -> GpuArm:
    return GpuArm(name, HEADS[0], k, selector=True, **more)


def eagle3(name: str, k: int, **more: Any) -> GpuArm:
    return GpuArm(name, HEADS[1], k, stock=True, **more)


# The most valuable first. Stock vLLM does not read the selector of the same head.
ARMS = {
    arm.label: arm
    for arm in (
        p_eagle("P-EAGLE", 3),
        GpuArm("none", stock=True),
        eagle3("EAGLE-3", 3),
        p_eagle("P-EAGLE with look-up", 5, lookup=2),
        p_eagle("P-EAGLE, stock V1", 3, stock=True, v1=True),
        GpuArm("n-gram", "ngram", 5, stock=True),
        eagle3("EAGLE-3", 2),
        p_eagle("P-EAGLE, adaptive verification", 5, speculative=ADAPTIVE, batches=(64,)),
        p_eagle("P-EAGLE by batch size", 5, speculative=BY_BATCH_SIZE, batches=(64, 1)),
        p_eagle("P-EAGLE, sampled", 3, probabilistic=True, batches=(1, 64)),
        eagle3("EAGLE-3, sampled", 3, probabilistic=True, batches=(1, 64)),
        # With graphs for as many requests as there are: vLLM's own end at 85 of them with K = 5.
        p_eagle("P-EAGLE with look-up, all graphs", 5, lookup=2, largest_graph=6 * MOST, batches=(MOST, 64)),
        GpuArm("n-gram, all graphs", "ngram", 5, stock=True, largest_graph=6 * MOST, batches=(MOST,)),
    )
}
WITH_GRAPHS = [name for name, arm in ARMS.items() if arm.largest_graph]


def run_arm(arm: str) -> Iterator[dict[str, Any]]:
    """A cell of acceptance by request and set, then one of tokens/s by concurrency, request and set."""
    drafting = ARMS[arm]
    turns.share(START_SECONDS)
    engine, on_cpu = Engine(drafting), committed().get(arm)
    requests = [{"temperature": temperature} for temperature in TEMPERATURES] if drafting.probabilistic else [{}]
    for sampling in requests if drafting.k else ():
        for cell in acceptance(engine, **sampling):
            yield cell | {"on a CPU": on_cpu and on_cpu[cell["set"]]["al_95"]}
    turns.have_to_itself(TIMED_SECONDS)
    for c in drafting.batches:
        for sampling in requests:
            for name in SETS:
                speeds = [speed(engine, name, c, **sampling) for _ in range(REPEATS)]
                yield {"arm": arm, "set": name, "c": c, **sampling, "tokens_per_second": arms.summary(speeds, 1)}


def acceptance(engine: Engine, **sampling: Any) -> Iterator[dict[str, Any]]:
    """A cell for each set."""
    for name, answered in engine.acceptance(first_answers(), PART_OF_A_SET, **LESS, **sampling):
        counts = np.asarray(answered["counts"])
        cell = {"arm": engine.arm.label, "set": name, **sampling, **al_of(counts)}
        yield cell | {"prompts": len(counts), "tokens": sum(answered["tokens"])}


def speed(engine: Engine, name: str, c: int, **sampling: Any) -> float:
    """Tokens a second of answers to a set's first turns, ``c`` at once, over ``TIMED_PROMPTS`` prompts or c."""
    number = max(c, TIMED_PROMPTS)
    turns_of = read_set(name, number)
    chats = [turns_of[at % len(turns_of)][:1] for at in range(number)]
    tokens, began = 0, time.perf_counter()
    for at in range(0, number, c):
        tokens += sum(len(output.token_ids) for output in engine.answer(chats[at : at + c], TIMED_TOKENS, **sampling))
    return tokens / (time.perf_counter() - began)


def first_answers() -> dict[str, list[str]]:
    """Those that second turns followed on the CPU, so that all prompts are the same; none without a GPU."""
    if not HAS_GPU:
        return {}
    kept = next(row for row in read_lines(KEPT) if row["settings"]["arm"]["name"] == NONE.name)
    return {name: kept["sets"][name]["first"] for name in SETS}


def serve(arm: str, log: str) -> Iterator[dict[str, Any]]:
    """A cell: latencies of a server with an arm, in milliseconds.

    Args:
        log: the server's is LOG.log, its client's LOG-client.log.
    """
    from peagle_tools.bench import client
    from peagle_tools.bench.cells import Cell
    from peagle_tools.bench.suite import Suite
    from peagle_tools.shared.server import Server

    drafting = ARMS[arm]
    drafting.check()
    config = drafting.speculative_config()
    k = {"k": [config.pop("num_speculative_tokens")]} if config else {}
    data = f"--dataset-name custom --dataset-path {PROMPTS}/humaneval.jsonl --disable-shuffle --request-rate {RATE}"
    suite = Suite.model_validate(
        {
            "name": "server",
            "target": str(drafting.target),
            "serve": {"flags": shlex.join(flags(drafting.engine))},
            "arms": {arm: {"speculative_config": config, **k}},
            "datasets": {"HumanEval": {"flags": data, "prompts": REQUESTS, "output_tokens": ANSWER}},
            "concurrency": [MOST],
        }
    )
    cell = Cell(arm, drafting.k, "HumanEval", MOST, 1)
    here, out = Path(log).parent, Path(log).name
    turns.share(START_SECONDS)
    env = client.environment(suite, arm)
    with Server(client.serve_arguments(suite, arm, drafting.k), cwd=here, env=env, log=here / f"{out}.log") as up:
        started = up.wait_until_ready(START_SECONDS)
        turns.have_to_itself(TIMED_SECONDS)
        raw = client.measure(suite, cell, up, cwd=here, log=here / f"{out}-client.log")
    latencies = {name: raw[name] for name in raw if name.startswith(PERCENTILES)}
    between = np.percentile([1000 * seconds for answer in raw["itls"] for seconds in answer], (50, 99))
    latencies |= {f"p{p}_itl_ms": float(ms) for p, ms in zip((50, 99), between, strict=True)}
    cell_of = {"arm": arm, "requests a second": RATE, **{name: round(ms, 2) for name, ms in latencies.items()}}
    yield cell_of | {"output_throughput": round(raw["output_throughput"]), "start_seconds": round(started)}


def flags(engine: dict[str, Any]) -> list[str]:
    """Arguments of ``LLM`` as those of a server."""
    named = {name.replace("_", "-"): value for name, value in engine.items()}
    switches = [f"--{'' if value else 'no-'}{name}" for name, value in named.items() if isinstance(value, bool)]
    return switches + [f"--{name}={value}" for name, value in named.items() if not isinstance(value, bool)]
