"""What runs, in order of value. Without a GPU the same parts at tiny shapes, for rehearsal."""

import importlib.util
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import torch

from benchmarks import draft_step, engine, training
from benchmarks.arms import HAS_GPU, call

Kind = Literal["host", "kernels", "drafts", "bandwidth", "draft step", "engine", "training"]
JSON, OUTCOMES = "OUT.json", "OUT.jsonl"  # in a command: the file that it writes its result to
PYTEST = ("pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "benchmarks.gpu_day.outcomes", "--outcomes", OUTCOMES)
# vLLM raises where a step makes the host wait for the GPU, once it has warmed up.
SYNC_CHECK = {"VLLM_GPU_SYNC_CHECK": "error"}

HEAD = "gpt-oss-20b" if HAS_GPU else "tiny"
DEPTHS, BATCHES = ((7, 5), (1, 64)) if HAS_GPU else ((3,), (1, 2))
DRAFT_ARMS = (draft_step.OURS if HAS_GPU else "plugin V2 eager", "stock V1", "EAGLE-3 V2")
ENGINE_ARMS = (engine.OURS, "stock P-EAGLE K=7, V1", "EAGLE-3 K=3", "none", "EAGLE-3 K=7")
# (attention backend, how the engine runs it), as tests/gpu names them
FIRST_DRAFTS = [("FLASH_ATTN", "eager"), ("FLASH_ATTN", "full"), ("TRITON_ATTN", "eager"), ("TRITON_ATTN", "full")]
FIRST_DRAFTS = [*FIRST_DRAFTS, ("FLASH_ATTN", "compiled")] if HAS_GPU else [("CPU_ATTN", "eager")]
# (arm, tokens, rows sampled): flat forms have the logits of all rows at once, so that 20K tokens are too many for them
TRAINED = [
    ("partition", 20_480, "all depths"),
    ("partition", 4096, "COD"),
    ("flex", 4096, "COD"),
    ("sdpa", 2048, "COD"),
]
TRAINED = TRAINED if HAS_GPU else [(arm, 128, sampling) for arm, _, sampling in TRAINED]
LAST_DRAFTS = [("TRITON_ATTN", "compiled")] if HAS_GPU else []


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: its name in results and on the page; begins with its kind.
        command: what follows ``python -m``; it writes its result to the file JSON or OUTCOMES in it,
            each finished test or cell at once.
        limit: seconds after which it has failed.
        env: its own environment variables.
        needs: modules without which it cannot run.
    """

    kind: Kind
    name: str
    command: tuple[str, ...]
    limit: float
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ("vllm", "wrapt")

    def missing(self) -> list[str]:
        """Those of ``needs`` that are not installed here."""
        return [module for module in self.needs if importlib.util.find_spec(module) is None]


def drafts(backend: str, mode: str) -> Part:
    command = (*PYTEST, "tests/gpu/test_drafts.py", "-k", f"{backend} and {mode}")
    limit = 240 if mode == "compiled" or not HAS_GPU else 180
    env = {"PEAGLE_TEST_ARM": "plugin-v2"} | SYNC_CHECK
    return Part("drafts", f"drafts, {backend} {mode}", command, limit, env, ("pytest", "hypothesis", "vllm", "wrapt"))


def all_parts(llm: dict[str, Any] | None = None) -> list[Part]:
    """Every part; ``llm``: more arguments for ``LLM`` in draft steps and engines."""
    # A part each: hypothesis may compile a variant an example, 60 of them at up to 1.5 s.
    kernels = ("prepare_inputs", "gather_hidden", "walk_edges")
    twins = [(f"kernels, {kernel}", (*PYTEST, f"tests/kernels/test_{kernel}.py")) for kernel in kernels]
    interpreted = {} if HAS_GPU else {"TRITON_INTERPRET": "1"}
    widths = ("--widths", "2880") if HAS_GPU else ()
    step = {"head": HEAD, "batches": BATCHES, "repeats": draft_step.REPEATS, "llm": llm or {}}
    served = {"target": "gpt-oss-20b", "concurrency": BATCHES, "repeats": 2, "llm": llm or {}}
    steps = [
        (f"draft step, K={k} {arm}", call(draft_step.run_arm, JSON, arm=arm, k=k, **step), draft_step.ARMS[arm].env)
        for k, arm in product(DEPTHS, DRAFT_ARMS)
    ]
    engines = [
        (f"engine, {arm}", call(engine.run_arm, JSON, arm=arm, **served), engine.ARMS[arm].env | SYNC_CHECK)
        for arm in ENGINE_ARMS
    ]
    trains = [("training, parity", call(training.parity, JSON))]
    trains += [
        (f"training, {arm}, {tokens} tokens, {rows}", call(training.step, JSON, arm=arm, tokens=tokens, sampling=rows))
        for arm, tokens, rows in TRAINED
    ]
    if not HAS_GPU or torch.cuda.device_count() > 1:
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        trains.append(("training, two processes", (*torchrun, "-m", "benchmarks.training", JSON)))
    return [
        Part("host", "host", call(draft_step.bandwidth, JSON), 90, needs=()),
        *(Part("kernels", *twin, 240, interpreted, ("pytest", "hypothesis", "triton")) for twin in twins),
        *(drafts(*which) for which in FIRST_DRAFTS),
        Part("bandwidth", "bandwidth", ("benchmarks.kernels", "--out", JSON, *widths), 240),
        *(Part("draft step", name, command, 240, env) for name, command, env in steps),
        *(Part("engine", name, command, 360, env) for name, command, env in engines),
        *(Part("training", name, command, 240, needs=("speculators",)) for name, command in trains),
        *(drafts(*which) for which in LAST_DRAFTS),
    ]
