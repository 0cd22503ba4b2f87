"""Peak memory and time of one training step of a P-EAGLE head: ``python -m benchmarks.partition [--out FILE]``.

The same head and loss three ways: parts (peagle_tools.train), speculators' flat step with sdpa, and prefixes run again
for each of 8 segments, as NeMo Automodel does, built here on speculators' model. Each cell is a process of its own; its
peak is what the step takes beyond the resting process, on a GPU beyond what was allocated.
"""

import ctypes
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import arms
from benchmarks.shapes import NUM_AUX, Model

TOKENS = (512, 1024, 2048, 4096, 8192, 16_384)
DEPTHS = (4, 8, 16)
RATIOS = {"all depths": (1.0, 1.0), "COD": (0.7, 0.2)}  # COD: drop-token sampling at speculators' defaults
SHAPE = Model(hidden=128, intermediate=384, heads=4, kv_heads=4, head_dim=32, layers=4, vocab=512)
SEGMENTS = 8
CHUNK_ROWS = 1024  # of the partition
MOST_ROWS = 23_000  # of a forward with a dense mask; larger ones are left out
DTYPE = torch.bfloat16 if arms.HAS_GPU else torch.float32


def num_rows(tokens: int, depths: int, sampling: str) -> int:
    """Rows of a step: real ones, and about as many mask rows as speculators samples."""
    ratio, least = RATIOS[sampling]
    return tokens + sum(int((tokens - d) * max(ratio**d, least)) for d in range(1, depths))


def masked_rows(arm: str, tokens: int, depths: int, sampling: str) -> int:
    """Rows of the largest forward that has a dense mask among all its rows; the partition has none."""
    rows = num_rows(tokens, depths, sampling)
    return {"partition": 0, "sdpa": rows, "prefix reruns": tokens + (rows - tokens) // SEGMENTS}[arm]


def new_head(in_parts: bool) -> Any:
    """A Llama head of ``SHAPE`` with random weights on the device, ours or speculators' own with sdpa."""
    from speculators.models import peagle
    from transformers import LlamaConfig

    from peagle_tools.train.head import PEagleDraftModel

    config = peagle.PEagleSpeculatorConfig(
        transformer_layer_config=LlamaConfig(**SHAPE.config(), attn_implementation="sdpa"),
        draft_vocab_size=SHAPE.vocab,
        eagle_aux_hidden_state_layer_ids=list(range(NUM_AUX)),
        mask_token_id=1,
    )
    head = (PEagleDraftModel if in_parts else peagle.PEagleDraftModel)(config)
    for matrix in (head.embed_tokens, head.lm_head, head.verifier_lm_head):
        torch.nn.init.normal_(matrix.weight, std=0.02)
    return head.to("cuda" if arms.HAS_GPU else "cpu", DTYPE)


def new_batch(tokens: int, head: Any) -> dict[str, torch.Tensor]:
    """One document of random tokens and states, supervised from its second position."""
    shape, like = head.config.transformer_layer_config, head.fc.weight
    ids = torch.randint(shape.vocab_size, (1, tokens), device=like.device)
    return {
        "input_ids": ids,
        "hidden_states": torch.randn(1, tokens, NUM_AUX * shape.hidden_size).to(like),
        "verifier_last_hidden_states": torch.randn(1, tokens, shape.hidden_size).to(like),
        "document_ids": torch.zeros_like(ids),
        "loss_mask": (torch.arange(tokens, device=like.device) > 0).float()[None],
    }


def whole(head: torch.nn.Module, batch: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    head(**batch, **options)[1].backward()


def prefix_reruns(head: torch.nn.Module, batch: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    """Segment by segment, forward and backward: its real and mask rows, after all real rows before them."""
    from speculators.models.peagle import core

    ratios = options["down_sample_ratio"], options["down_sample_ratio_min"]
    tokens, mask = batch["input_ids"].shape[1], batch["loss_mask"]
    anchor, depth = core.generate_cod_sample_indices(tokens, mask, options["num_depths"], *ratios)
    for start in range(0, tokens, size := -(-tokens // SEGMENTS)):
        mine = (anchor < start + size) & ((depth == 0) | (anchor >= start))
        own = mask * (torch.arange(tokens, device=mask.device) >= start)
        share = own[0, (anchor + depth)[mine]].sum() / mask[0, anchor + depth].sum()
        until = start + size + options["num_depths"]
        read = {name: value[:, :until] for name, value in (batch | {"loss_mask": own}).items()}
        with patch.object(core, "generate_cod_sample_indices", return_value=(anchor[mine], depth[mine])):
            (head(**read, **options)[1] * share).backward()


STEPS = {"partition": whole, "sdpa": whole, "prefix reruns": prefix_reruns}


def options_of(depths: int, sampling: str) -> dict[str, Any]:
    """What speculators' forward is called with."""
    from speculators.losses import resolve_loss_config

    ratio, least = RATIOS[sampling]
    ratios = {"down_sample_ratio": ratio, "down_sample_ratio_min": least}
    return {"num_depths": depths, "loss_config": resolve_loss_config("kl_div", "eager"), **ratios}


def measure(arm: str, tokens: int, depths: int, sampling: str, chunk_rows: int) -> dict[str, Any]:
    """One cell, in this process."""
    torch.manual_seed(0)
    head, step = new_head(in_parts=arm == "partition"), STEPS[arm]
    options = options_of(depths, sampling) | ({"chunk_rows": chunk_rows} if arm == "partition" else {})
    step(head, new_batch(64, head), options)  # what is loaded and allocated once
    batch = new_batch(tokens, head)
    resting = _memory(reset=True)
    began = _now()
    step(head, batch, options)
    seconds = _now() - began
    peak = (_memory() - resting) / 1e6
    cell = {"arm": arm, "tokens": tokens, "depths": depths, "sampling": sampling}
    return cell | {"rows": num_rows(tokens, depths, sampling), "peak_mb": round(peak), "seconds": round(seconds, 2)}


def _now() -> float:
    """Seconds: of this process on a CPU, which others may share; of the clock on a GPU."""
    if not arms.HAS_GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _memory(reset: bool = False) -> int:
    """The most bytes held since the last reset; at a reset, those held now."""
    if arms.HAS_GPU:
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        ctypes.CDLL(None).malloc_trim(0)  # else what the first step freed counts as resting
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def run_all(tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Each cell, from a process of its own, or its error; without those whose masks are too large."""
    for length, depths, sampling, arm in product(tokens, DEPTHS, RATIOS, STEPS):
        if masked_rows(arm, length, depths, sampling) > MOST_ROWS:
            continue
        job = {"arm": arm, "tokens": length, "depths": depths, "sampling": sampling}
        try:
            yield arms.run(measure, {}, **job, chunk_rows=CHUNK_ROWS)
        except arms.ArmError as error:
            yield job | {"error": str(error)}


def measure_all() -> dict[str, Any]:
    cells = []
    for cell in run_all(TOKENS):
        print(cell, flush=True)
        cells.append(cell)
    shape = f"width {SHAPE.hidden}, {SHAPE.layers} layers, vocabulary {SHAPE.vocab}"
    shape += f", speculators {version('speculators')}"
    return {"head": shape, "chunk_rows": CHUNK_ROWS, "rows_limit": MOST_ROWS, "cells": cells}


if __name__ == "__main__":
    arms.main(__doc__, measure_all)
