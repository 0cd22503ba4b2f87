"""What the benchmark scripts share: a process for each arm, samples summed up, results written."""

import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
HAS_GPU = torch.cuda.is_available()

# The same for every arm; what the caller's own environment says of these counts for nothing.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the arm's own process, to look inside
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not on every host, and no arm's advantage
}
ON_CPU = {"OMP_NUM_THREADS": "1"}
# An arm's runner; Model Runner V2 needs Triton's interpreter where there is no GPU.
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"} | ({} if HAS_GPU else {"TRITON_INTERPRET": "1"})
STOCK = {"PEAGLE_VLLM_DISABLE": "1"}
# What an arm inherits from nobody.
FORGOTTEN = ("VLLM_USE_V2_MODEL_RUNNER", "PEAGLE_VLLM_DISABLE", "TRITON_INTERPRET")

MARK = "arm's result: "
REASON_CHARACTERS = 400


class ArmError(RuntimeError):
    """An arm's process failed; the message is the last line that it wrote."""


def environment(env: dict[str, str]) -> dict[str, str]:
    """All of the environment of an arm whose own variables are ``env``."""
    inherited = {key: value for key, value in os.environ.items() if key not in FORGOTTEN}
    return inherited | ENVIRONMENT | ({} if HAS_GPU else ON_CPU) | env


def run(module: str, arguments: Sequence[str], env: dict[str, str], timeout: float | None = None) -> Any:
    """What an arm hands over, run as ``python -m module arguments`` in a process of its own.

    Args:
        timeout: seconds; None waits for ever.

    Raises:
        ArmError: the process failed, or took longer.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(env), capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise ArmError(f"took longer than {timeout:.0f} s") from None
    handed = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode == 0 and handed:
        return json.loads(handed[-1].removeprefix(MARK))
    raise ArmError(_reason(done.stderr, done.stdout) or f"exit status {done.returncode}")


def _reason(stderr: str, stdout: str) -> str:
    """Why a process failed, in one line: its last exception, or else the last thing that it wrote."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    raised = [i for i, line in enumerate(lines) if line.split(":")[0].endswith(("Error", "Exception", "Exit"))]
    if raised:
        return " ".join(lines[raised[-1] :])[:REASON_CHARACTERS]
    return (lines or stdout.splitlines() or [""])[-1].strip()


def hand_over(result: Any) -> None:
    """Give an arm's result to the process that runs it."""
    print(MARK + json.dumps(result), flush=True)


def prepare_process() -> None:
    """What an arm's process needs before vLLM is imported: the interpreter where asked for, and the plugin."""
    if os.environ.get("TRITON_INTERPRET"):
        from benchmarks.interpreter import enable

        enable()
    if not os.environ.get("PEAGLE_VLLM_DISABLE"):
        from peagle_vllm import plugin

        plugin.register()  # idempotent: an installed distribution registers through its entry point too
    if not HAS_GPU:
        # A start on tiny models is mostly vLLM's garbage collections over its own modules: hide those from them.
        import vllm.entrypoints.llm  # noqa: F401

        gc.freeze()


def tiny_llm(batch: int, token_budget: int, head: str, speculative: dict[str, Any]) -> Any:
    """A live ``LLM`` on the tiny target of this repository, in this process.

    Args:
        batch: requests at a time.
        token_budget: rows of a target step.
        head: a folder of models/.
        speculative: the rest of speculative_config.
    """
    from vllm import LLM

    return LLM(
        str(ROOT / "models/tiny-llama"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=batch,
        max_num_batched_tokens=token_budget,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        speculative_config={"method": "eagle3", "model": str(ROOT / "models" / head)} | speculative,
    )


def inside(llm: Any) -> tuple[Any, Any]:
    """A live in-process ``LLM``'s model runner and drafter: V1's proposer, V2's speculator, or None."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return runner, getattr(runner, "speculator", None) or getattr(runner, "drafter", None)


def merged(arguments: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` with ``more`` on top, dictionaries inside alike."""
    both = {key: merged(arguments[key], more[key]) for key in arguments.keys() & more if isinstance(more[key], dict)}
    return arguments | more | both


def summary(samples: Iterable[float], digits: int = 2) -> dict[str, Any]:
    """Median and spread (10th and 90th percentile), and every sample, in the unit given."""
    values = [round(value, digits) for value in samples]
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9
    return {
        "median": round(statistics.median(values), digits),
        "p10": round(tenths[0], digits),
        "p90": round(tenths[-1], digits),
        "samples": values,
    }


def heading(columns: str) -> str:
    """A table's header; without a GPU it says so, in the table itself."""
    return columns if HAS_GPU else f"not a GPU result: tiny shapes on a CPU, times are the wall clock's\n{columns}"


def write_result(path: Path | None, doc: str | None, report: dict[str, Any]) -> None:
    """Write a result file, whole or not at all: what it is (the script's first line), and the report. None: nowhere."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"what": (doc or "").splitlines()[0]} | report, indent=1) + "\n")
    partial.replace(path)
