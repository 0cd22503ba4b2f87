"""Rung 1: kernels equal their twins, drafts equal the reference, and the ratios of engines and draft steps."""

import os
from collections.abc import Iterator
from itertools import product
from typing import Any

from benchmarks import engine, kernels
from benchmarks.arms import HAS_GPU, SLOWER, call
from benchmarks.page import Goal, Table, having, measured, ratio
from benchmarks.parts import PYTEST, Part

# A rehearsal has one kernel and one case of drafts: the suite has all of them.
KERNELS = ("prepare_inputs", "gather_hidden", "select_candidates", "lookup_drafts") if HAS_GPU else ("gather_hidden",)
# Attention backends and how the engine runs them, as tests/gpu names them.
BACKENDS = ("FLASH_ATTN", "TRITON_ATTN") if HAS_GPU else ("CPU_ATTN",)
SHARED_MODES = ("full", "eager") if HAS_GPU else ("eager lookup",)
# Leaves the KV cache's size to vLLM, which allows no other process to allocate meanwhile.
COMPILED = [f"{backend} compiled" for backend in BACKENDS] if HAS_GPU else []
BATCHES = [1, 64, 16] if HAS_GPU else [1]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # what proves drafts runs side by side, and its models are tiny
ON_KERNELS = {"CUDA_LAUNCH_BLOCKING": "1"} if HAS_GPU else {"TRITON_INTERPRET": "1"}  # a fault names its launch
# vLLM says where a step makes the host wait for the GPU, once it has warmed up. Not in "compiled", whose later engines
# would be traced through the wrappers.
SYNC_CHECK = "VLLM_GPU_SYNC_CHECK"
# In seconds. An engine waits for the parts that run with it; one that hangs must leave it its time.
SHARED_LIMIT, ENGINE_LIMIT = 180 * SLOWER, 280 * SLOWER

NOTES = (
    "Engines: gpt-oss-20b's shapes with dummy weights, every arm with vLLM's default compilation; draft tokens are "
    "accepted at random at the published acceptance lengths (3.38 P-EAGLE K=7, 2.24 EAGLE-3 K=3, 2.59 K=7); experts "
    "are drawn uniformly at random."
)


def parts() -> list[list[Part]]:
    """The most valuable first; of engines, which need up to 28 GB, two start at the same time."""
    drafts = [f"{backend} {mode}" for mode, backend in product(SHARED_MODES, BACKENDS)]
    # A rehearsal has EAGLE-3's engine, that of rung 4 P-EAGLE's.
    names = [engine.OURS, engine.STOCK_PEAGLE, engine.EAGLE3, engine.NONE] if HAS_GPU else [engine.EAGLE3]
    others = [arm for arm in engine.ARMS if HAS_GPU and arm not in names]
    env = ONE_THREAD | ON_KERNELS
    exact = [Part(f"exact {name}", (*PYTEST, f"tests/kernels/test_{name}.py"), SHARED_LIMIT, env) for name in KERNELS]
    return [
        [*map(drafts_part, drafts), *exact, *map(engine_part, names[:2])],
        [Part("kernels", call(kernels.run_all), 90 * SLOWER)],
        [*map(engine_part, names[2:])],
        [*map(drafts_part, COMPILED[:1])],
        [*map(engine_part, others)],
        [*map(drafts_part, COMPILED[1:])],
    ]


def drafts_part(mode: str) -> Part:
    """tests/gpu on an attention backend, in one way to run the engine."""
    compiles = mode.endswith("compiled")
    env = {"PEAGLE_TEST_ARM": "plugin-v2"} | ONE_THREAD
    env |= {} if compiles else {SYNC_CHECK: os.environ.get(SYNC_CHECK, "warn")}
    command = (*PYTEST, "tests/gpu", "-k", mode.replace(" ", " and "))
    return Part(f"drafts {mode}", command, 300 * SLOWER if compiles or not HAS_GPU else SHARED_LIMIT, env)


def engine_part(arm: str) -> Part:
    env = engine.ARMS[arm].env | engine.ROUTING
    return Part(f"engine {arm}", call(engine.run_arm, arm=arm, batches=BATCHES), ENGINE_LIMIT, env)


def tables(cells: list[dict[str, Any]]) -> Iterator[Table]:
    yield "engines", having(cells, "tokens_per_second")
    yield "draft steps", having(cells, "/ roofline")
    yield "kernels", having(cells, "kernel")


def goals(cells: list[dict[str, Any]]) -> Iterator[Goal]:
    """Those of docs/performance.md."""
    for other, least in ((engine.STOCK_PEAGLE, {1: 1.25, 64: 1.1}), (engine.EAGLE3, {1: 1.69, 64: 1.25})):
        for c, goal in least.items():
            speeds = (measured(cells, "tokens_per_second", arm=arm, c=c) for arm in (engine.OURS, other))
            yield Goal(f"tokens/s over {other} at {c}", ">=", goal, ratio(*speeds))
    step = measured(cells, "/ roofline", arm=engine.OURS, c=1)
    yield Goal("draft step over its roofline at 1", "<=", 1.3, step)
    for cell in having(cells, "of_copy_bandwidth"):
        yield Goal(f"{cell['kernel']} at {cell['rows']} rows of {cell['width']}", ">=", 0.8, cell["of_copy_bandwidth"])
