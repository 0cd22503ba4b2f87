"""The drafters of ``benchmarks.real`` on a GPU, as a user gets them: parts of ``benchmarks.gpu_day``.

bfloat16, vLLM's default compilation, Model Runner V2 but for stock P-EAGLE. One start an arm: acceptance on all
prompts, while other arms start; then, alone, tokens/s at every concurrency. Without a GPU: tiny models, eager, few
prompts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arms, turns
from benchmarks.arms import HAS_GPU, SLOWER
from benchmarks.real import SETS, TARGET, Engine, RealArm, al_of, committed

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
REPEATS = 3 if HAS_GPU else 1
TIMED_PROMPTS, TIMED_TOKENS = (8, 64) if HAS_GPU else (1, 8)  # at least so many prompts
LESS: dict[str, Any] = {} if HAS_GPU else {"max_tokens": 8}  # of an answer whose acceptance is measured
PART_OF_A_SET = None if HAS_GPU else 2  # prompts whose acceptance is measured; None: all
START_SECONDS, TIMED_SECONDS = 210 * SLOWER, 60 * SLOWER  # the limits of an arm's two stages
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
                number = max(c, TIMED_PROMPTS)
                speeds = [engine.speed(name, c, number, TIMED_TOKENS, **sampling) for _ in range(REPEATS)]
                yield {"arm": arm, "set": name, "c": c, **sampling, "tokens_per_second": arms.summary(speeds, 1)}


def acceptance(engine: Engine, **sampling: Any) -> Iterator[dict[str, Any]]:
    """A cell for each set."""
    for name, answered in engine.acceptance(PART_OF_A_SET, **LESS, **sampling):
        counts = np.asarray(answered["counts"])
        cell = {"arm": engine.arm.label, "set": name, **sampling, **al_of(counts)}
        yield cell | {"prompts": len(counts), "tokens": sum(answered["tokens"])}
