"""Training steps of P-EAGLE heads on a GPU, as parts of ``python -m benchmarks.gpu_day``: exactness, speed and memory.

Weights are float32 and arithmetic is bfloat16, as in ``peagle-vllm train run``. Without a GPU, which flex_attention
needs to run backward, speculators' sdpa stands in for it, and two processes for two GPUs.
"""

import copy
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import arms, partition
from benchmarks.arms import HAS_GPU
from benchmarks.shapes import HEADS, Model

DEVICE = "cuda" if HAS_GPU else "cpu"
ATTENTION = {"partition": "sdpa", "flex": "simple_flex_attention" if HAS_GPU else "sdpa", "sdpa": "sdpa"}
_WIDE = replace(HEADS["gpt-oss-20b"].target, layers=4, intermediate=HEADS["gpt-oss-20b"].intermediate)
_TINY = Model(hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, layers=2, vocab=256)
STEP = _WIDE if HAS_GPU else _TINY  # the published head of gpt-oss-20b
PARITY = Model(1024, 2816, 16, 8, 64, 4, 32_000) if HAS_GPU else _TINY
DEPTHS, TOKENS, CHUNK_ROWS = 8, 2048 if HAS_GPU else 96, 1024 if HAS_GPU else 64
NOISE = 1e-4  # of gradients in float32 that are added up in another order

Cell = dict[str, Any]


def gradients(head: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of all weights that have one, in float64; those of a sharded head put together."""
    found = {name: weight.grad for name, weight in head.named_parameters() if weight.grad is not None}
    whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in found.items()}
    return {name: grad.double().clone() for name, grad in whole.items()}


def furthest(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient relative to its own largest number."""
    return max(float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in exact.items())


def run(arm: str, head: Any, batch: dict[str, torch.Tensor], sampling: str, dtype: torch.dtype) -> None:
    """Forward and backward in ``dtype``, that of the hidden states, too, with the rows that seed 0 samples."""
    torch.manual_seed(0)
    batch = batch | {name: value.to(dtype) for name, value in batch.items() if name.endswith("hidden_states")}
    options = partition.options_of(DEPTHS, sampling) | ({"chunk_rows": CHUNK_ROWS} if arm == "partition" else {})
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        loss = head(**batch, **options)[1]
    loss.backward()


def parity() -> list[Cell]:
    """How far the gradients of each arm in bfloat16 are from speculators' own in float32; ours may be twice as far."""
    found: dict[str, float] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, arm, dtype in (("exact", "sdpa", torch.float32), *((arm, arm, torch.bfloat16) for arm in ATTENTION)):
        torch.manual_seed(1)
        head = partition.new_head(arm == "partition", PARITY, ATTENTION[arm], torch.float32)
        run(arm, head, partition.new_batch(TOKENS, head), "COD", dtype)
        if name == "exact":
            exact = gradients(head)
        else:
            found[name] = furthest(gradients(head), exact)
    return [{"check": f"bfloat16, {arm}", "error": error, "limit": 2 * found["sdpa"]} for arm, error in found.items()]


def step(arm: str, tokens: int, sampling: str) -> list[Cell]:
    """Time and peak memory of the second of two steps, AdamW included; weights and its state are in the peak."""
    torch.manual_seed(0)
    head = partition.new_head(arm == "partition", STEP, ATTENTION[arm], torch.float32)
    optimizer = torch.optim.AdamW(weight for weight in head.parameters() if weight.requires_grad)
    batch = partition.new_batch(tokens, head)
    for _ in range(2):
        if HAS_GPU:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        began = time.perf_counter()
        run(arm, head, batch, sampling, torch.bfloat16)
        optimizer.step()
        optimizer.zero_grad()
        if HAS_GPU:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 1e9 if HAS_GPU else None
    rows = partition.num_rows(tokens, DEPTHS, sampling)
    return [{"arm": arm, "tokens": tokens, "sampling": sampling, "rows": rows, "seconds": seconds, "peak_gb": peak}]


def two(out: Path) -> None:
    """In each of torchrun's two processes: DDP and FSDP2 of the whole head against one process with both batches.

    One batch has twice the tokens of the other, so that their mask rows run in more chunks.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank = int(os.environ["RANK"])
    if HAS_GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    torch.manual_seed(2)
    head = partition.new_head(True, PARITY, dtype=torch.float32)
    batches = [partition.new_batch(TOKENS // 2 * (1 + number), head) for number in range(2)]
    alone = copy.deepcopy(head)
    for batch in batches:
        run("partition", alone, batch, "COD", torch.float32)
    exact = {name: grad / 2 for name, grad in gradients(alone).items()}
    cells = []
    for name in ("DDP", "FSDP2"):
        model = copy.deepcopy(head)
        wrapped = DistributedDataParallel(model) if name == "DDP" else fully_shard(model)
        run("partition", wrapped, batches[rank], "COD", torch.float32)
        cells.append({"check": f"two processes, {name}", "error": furthest(gradients(model), exact), "limit": NOISE})
    if rank == 0:
        out.write_text(json.dumps(cells))
    dist.destroy_process_group()


def page(cells: list[Cell]) -> str:
    """A line for each check, and the table of steps."""
    lines = []
    for cell in (cell for cell in cells if "check" in cell):
        limit = f"limit {cell['limit']:.1e}: {arms.verdict(cell['error'] <= cell['limit'])}"
        lines.append(f"{cell['check']}: gradients {cell['error']:.1e} off, {limit}")
    rows = []
    for cell in (cell for cell in cells if "arm" in cell):
        peak = f"{cell['peak_gb']:.1f}" if cell["peak_gb"] else "-"
        speed = f"{cell['tokens'] / cell['seconds']:,.0f}"
        where = f"{cell['tokens']:,}", cell["sampling"], f"{cell['rows']:,}"
        rows.append((cell["arm"], *where, f"{cell['seconds']:.2f}", speed, peak))
    columns = ("arm", "tokens", "sampling", "rows", "s", "tokens/s", "peak GB")
    return "\n".join([*lines, *([arms.measured_table(columns, rows)] if rows else [])])


if __name__ == "__main__":
    two(Path(sys.argv[1]))
