"""Tokens per second of the whole engine and one draft step of it, every drafter: parts of ``benchmarks.gpu_day``.

Dummy weights of gpt-oss-20b's shapes, and synthetic rejection at the published acceptance lengths (SPEED-Bench code):
the engine's speed is real, the acceptance is the published one. One start an arm, every concurrency c inside: c
requests at once, greedy, to the same number of tokens; then at every c ``propose()`` of full decode batches. Columns of
a draft step: GPU time behind a busy device, host time on an idle one, and the time over the roofline, which is the
bytes that the step must move at the measured copy bandwidth. Without a GPU: tiny models, few tokens, the wall clock,
and whatever acceptance random weights give.
"""

import gc
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import arms, turns
from benchmarks.arms import HAS_GPU, SLOWER, STOCK, V1, V2
from benchmarks.shapes import GPT_OSS_20B, GPT_OSS_HEAD, TINY, TINY_HEAD, write_config
from benchmarks.timing import STEPS, WARM, copy_bandwidth, watched
from peagle_tools.shared import engines
from peagle_tools.shared.acceptance import read_engine
from peagle_vllm import observer

# What engines are measured with: a head, and its target's config.json.
HEAD, TARGET = (GPT_OSS_HEAD, GPT_OSS_20B) if HAS_GPU else (TINY_HEAD, TINY)
MOST_K = 7  # of an arm
PROMPT, TOKENS = (128, 512) if HAS_GPU else (8, 8)
REPEATS = 2
START_SECONDS, TIMED_SECONDS = 170 * SLOWER, 100 * SLOWER  # the limits of an arm's two stages
# A dummy router sends every token to the same experts, so that few of them are read: the target would be too fast.
ROUTING = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}


@dataclass(frozen=True)
class EngineArm:
    """A drafter on a runner."""

    env: dict[str, str]  # its environment variables
    drafter: str  # the class that vLLM must build, or the arm measured something else
    k: int = 0  # draft tokens a step; 0 without speculation
    parallel: bool = False
    length: float = 1.0  # the acceptance length that vLLM's synthetic rejection is set to, on a GPU
    lookup: int = 0  # prompt_lookup_min
    window: int = 0  # tokens that the head's layers see; 0: all

    def head_config(self) -> dict[str, Any]:
        config = HEAD.config(self.parallel)
        layers = ["sliding_attention"] * config["num_hidden_layers"]
        return config | ({"layer_types": layers, "sliding_window": self.window} if self.window else {})


OURS, NONE = "P-EAGLE K=7, V2", "none"
STOCK_PEAGLE, EAGLE3 = "stock P-EAGLE K=7, V1", "EAGLE-3 K=3, V2"
P_EAGLE = EngineArm(V2, "ParallelEagleSpeculator", 7, length=3.38, parallel=True)
# With the published acceptance length at each K. The first ones make the ratios.
ARMS = {
    OURS: P_EAGLE,
    STOCK_PEAGLE: EngineArm(V1 | STOCK, "EagleProposer", 7, length=3.38, parallel=True),
    EAGLE3: EngineArm(V2 | STOCK, "EagleSpeculator", 3, length=2.24),
    NONE: EngineArm(V2 | STOCK, "NoneType"),
    "P-EAGLE K=7, V1": EngineArm(V1, "ParallelEagleProposer", 7, length=3.38, parallel=True),
    "EAGLE-3 K=7, V2": EngineArm(V2 | STOCK, "EagleSpeculator", 7, length=2.59),
}
# For long prompts.
WINDOW, LOOKUP = f"{OURS}, window 1024", f"{OURS}, look-up"
LONG_ARMS = {**ARMS, WINDOW: replace(P_EAGLE, window=1024), LOOKUP: replace(P_EAGLE, lookup=2)}


def run_arm(arm: str, batches: list[int], prompts: tuple[int, ...] = (PROMPT,)) -> Iterator[dict]:
    """A cell of one arm's engine for every prompt length and concurrency, then one of its draft step for each.

    Prompts other than ``PROMPT`` are in the prefix cache when their answers are timed.
    """
    drafting = LONG_ARMS[arm]
    turns.share(START_SECONDS)
    engine, drafter = dummy_llm(drafting, batches, max(prompts))
    turns.have_to_itself(TIMED_SECONDS)
    copied = copy_bandwidth()
    for prompt, c in product(prompts, batches):
        generate(engine, c, prompt, max(TOKENS // 8, 2))  # whatever compiles or warms up late
        before = read_engine(engine)
        speeds = [c * TOKENS / generate(engine, c, prompt, TOKENS) for _ in range(REPEATS)]
        counts = read_engine(engine).since(before)
        length, speed = counts.length if counts.num_drafts else None, arms.summary(speeds, 1)
        yield {"arm": arm, "prompt": prompt, "c": c, "tokens_per_second": speed, "acceptance_length": length}
    if drafter is not None:  # last: a step that cannot be watched must not cost an engine's
        for prompt, c in product(prompts, batches):
            step = draft_step(engine, drafter, drafting, prompt, c, copied)
            yield {"arm": arm, "prompt": prompt, "c": c, **step}


def draft_step(engine: Any, drafter: Any, arm: EngineArm, prompt: int, batch: int, copied: float) -> dict[str, Any]:
    """A draft step with ``batch`` requests; ``copied`` is the bandwidth of a copy, in bytes a second."""
    # Some more steps, since the requests of a large batch do not start in one; and on a GPU each may accept all drafts.
    num_tokens = (WARM + 2 * STEPS + 8 + batch * prompt // 2048) * (arm.k + 1 if HAS_GPU else 2)
    room = engine.llm_engine.vllm_config.model_config.max_model_len - prompt - 1
    with watched(drafter, batch, arm.k) as steps:
        generate(engine, batch, prompt, min(num_tokens, room))
    num_bytes = HEAD.step_bytes(arm.k, batch, parallel=arm.parallel)
    step = {"device_us": arms.summary(steps.device), "host_us": arms.summary(steps.host)}
    if prompt == PROMPT:  # the bytes are without keys and values
        step["/ roofline"] = round(step["device_us"]["median"] * 1e-6 * copied / num_bytes, 2)
    return step


def prepare_process() -> None:
    """What an arm's process needs before vLLM is imported: the interpreter where asked for, and the plugin."""
    if os.environ.get("TRITON_INTERPRET"):
        from peagle_kernels import dispatch
        from tools.interpreter import enable

        enable()
        dispatch.INTERPRETED = False  # the plain torch versions: interpreted kernels take longer than all the rest
    if not os.environ.get("PEAGLE_VLLM_DISABLE"):
        from peagle_vllm import plugin

        plugin.register()  # idempotent: an installed distribution registers through its entry point too
    if not HAS_GPU:
        # A start on tiny models is mostly vLLM's garbage collections over its own modules: hide those from them.
        import vllm.entrypoints.llm  # noqa: F401

        gc.freeze()


def graph_sizes(batches: list[int], k: int) -> dict[str, Any]:
    """Capture sizes for every batch size: the target's rows, a P-EAGLE draft's, and those of EAGLE-3's later steps.

    V1 rounds sizes up to whole requests of 1 + K rows and drops what that lifts over the largest.
    """
    whole = [-(-n * 2 * k // (k + 1)) * (k + 1) for n in batches]
    sizes = sorted({*batches, *(n * (k + 1) for n in batches), *whole} - {0})
    return {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]}


def dummy_pair(arm: EngineArm, batches: list[int], folder: Path, prompt: int = PROMPT) -> dict[str, Any]:
    """Arguments of ``LLM`` for dummy weights and prompts up to ``prompt`` tokens, with graphs for every batch size."""
    most, k = max(batches), arm.k
    arguments: dict[str, Any] = {
        "model": write_config(folder / "target", TARGET),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_log_stats": False,  # its counters say what was accepted
        "enable_prefix_caching": prompt != PROMPT,
        "max_num_seqs": most,
        # The same in every arm, so that a target that one has compiled serves others.
        "max_num_batched_tokens": max(8192 if HAS_GPU else 512, 2 * MOST_K * most) + (MOST_K - 1) * most,
    }
    if HAS_GPU:
        arguments |= {"dtype": "bfloat16", "max_model_len": max(4096, prompt + 2048)}
        # A size that profiling would find forbids other processes to allocate meanwhile.
        arguments |= {"kv_cache_memory_bytes": (4 if prompt == PROMPT else 12) << 30, "gpu_memory_utilization": 0.3}
        arguments["compilation_config"] = graph_sizes(batches, k)
    else:
        arguments |= {"dtype": "float32", "max_model_len": 128}
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    if k:
        model = write_config(folder / "head", arm.head_config())
        speculative = {"method": "eagle3", "model": model, "num_speculative_tokens": k}
        # Stock vLLM has no look-up, and refuses 0 in this field.
        is_ours = arm.parallel and "PEAGLE_VLLM_DISABLE" not in arm.env
        speculative |= {"parallel_drafting": True} if arm.parallel else {}
        speculative |= {"prompt_lookup_min": arm.lookup} if is_ours else {}
        if HAS_GPU:
            speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": arm.length}
        arguments["speculative_config"] = speculative
    return arguments


def dummy_llm(arm: EngineArm, batches: list[int], prompt: int = PROMPT) -> tuple[Any, Any]:
    """A live ``LLM`` with dummy weights, and its drafter, which must be the arm's (None without speculation)."""
    prepare_process()
    from vllm import LLM

    # The folder's path is part of the key by which vLLM keeps what it compiled.
    digest = hashlib.sha256(json.dumps([TARGET, arm.head_config()]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"peagle-dummy-{digest}")
    llm = LLM(**dummy_pair(arm, batches, folder, prompt))
    drafter = drafter_of(llm)
    if (built := type(drafter).__name__) != arm.drafter:
        raise RuntimeError(f"vLLM built the drafter {built}, this arm measures {arm.drafter}")
    return llm, drafter


def drafter_of(llm: Any) -> Any:
    """The drafter of a live in-process ``LLM``: V1's proposer, V2's speculator, or None."""
    return observer.drafter_of(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker)


def generate(llm: Any, batch: int, prompt_len: int, num_tokens: int) -> float:
    """Serve ``batch`` requests at once to ``num_tokens`` each; returns seconds."""
    prompts = [[2 + (7 * i + j) % 200 for j in range(prompt_len)] for i in range(batch)]
    began = time.perf_counter()
    engines.generate(llm, prompts, num_tokens, ignore_eos=True, detokenize=False)
    return time.perf_counter() - began
