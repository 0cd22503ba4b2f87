"""Engines and traffic drawn from a seed: what ``tests.drafts.fuzz`` runs. The seed decides everything."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.conftest import ARM
from tests.drafts import targets
from tests.drafts.grid import FACTORS, MAX_MODEL_LEN, Cell
from tests.support import random_heads as tiny_heads
from tests.support.engines import BLOCK_SIZE, Request, Settings

V2 = ARM == "plugin-v2"
# The simulation computes the first ones' hidden states itself; of the others it takes those that vLLM captured. V1
# cannot group the layers of a GPT-OSS, nor those of a head of which only some slide.
SIMULATED = ("llama", "qwen3", "qwen3_moe")
TARGETS = (*SIMULATED, *SIMULATED, "mistral", *(("gpt_oss",) if V2 else ()))
AUX = ((2, 4, 5), (2, 4, 5), (0, 8), (1, 3, 5, 7), (1, 2, 4, 6, 8))
SEEDS_A_POOL = 40  # seeds that draw from the same requests, whose unspeculated answers are then computed once
POOL = 48
WAVES = 6 if V2 else 3
ANSWERS = (2, 9, 9, 16, 28) if V2 else (2, 12, 24, 40)
SAMPLINGS: tuple[tuple[tuple[str, Any], ...], ...] = (
    *((),) * 8,
    (("repetition_penalty", 1.3), ("presence_penalty", 0.5)),
    (("ignore_eos", False), ("stop_token_ids", list(range(3, 60)))),
    # vLLM's V1 masks stop tokens in the last row of a step although the drafts before it reach min_tokens.
    (("stop_token_ids", list(range(60, 100))), ("min_tokens", 6 if V2 else 0)),
    (("logprobs", 2),),
    (("temperature", 0.3),),
    # vLLM's V1 rewinds a seed's generator after a chunk of a prompt, which a CPU's cannot do.
    (("temperature", 1.0), ("top_p", 0.9), *((("seed", 5),) if V2 else ())),
)


@dataclass(frozen=True)
class Configuration:
    """An engine, and the requests that it gets, wave after wave."""

    seed: int
    target: str  # of ``TARGETS``
    head: tiny_heads.HeadSpec
    settings: Settings  # without their folders
    # V2's draft graphs, as ``tests.support.graphs.emulate`` takes them; of some configurations only.
    graphs: dict[str, Any] | None
    kernels: bool  # Triton's interpreter runs our kernels; else their torch twins run, four times as fast a row
    waves: tuple[tuple[Request, ...], ...]


def draw(seed: int) -> Configuration:
    rng = random.Random(f"{ARM} {seed}")
    fixed = {"window": 0, "weights": "loaded", "drafts": "greedy"}  # below these have more choices
    cell = Cell(**{name: rng.choice(choices) for name, choices in FACTORS.items() if name not in fixed}, **fixed)
    # A rounded gate moves a selector's scores by more than rounding moves logits: exactness is not defined there.
    cell = replace(cell, dtype="bfloat16" if rng.random() < 0.1 and not cell.selector else "float32")
    # On V2 fewer: verifying draft tokens is what the interpreter takes longest for.
    cell = replace(cell, k=rng.choice((cell.k, rng.randint(1, 18), *((1, 2, 3, 4) if V2 else ()))))
    target = rng.choice(TARGETS)
    if target not in ("llama", "qwen3") and cell.fmt == "served":
        cell = replace(cell, fmt="speculators")  # the tiny head names a target of its own family
    cell = replace(cell, family=rng.choice(("llama", "qwen3")) if cell.fmt != "served" else target)
    head = _head(rng, cell, target, seed)
    kernels, settings = V2 and seed % 10 == 0, _settings(rng, cell, head, target)
    graphs = _graphs(rng, settings)
    return Configuration(seed, target, head, settings, graphs, kernels, tuple(_waves(rng, kernels, seed)))


def _head(rng: random.Random, cell: Cell, target: str, seed: int) -> tiny_heads.HeadSpec:
    # In bfloat16 each layer rounds again: from three on, one row in thousands differs by 3 ulp, stock vLLM's alike.
    layers = min(rng.randint(1, 4), 2 if cell.dtype == "bfloat16" else 4)
    spec = replace(cell.head_spec(), seed=seed, layers=layers, aux_layers=rng.choice(AUX))
    kept = target in SIMULATED and cell.dtype == "float32"
    has_own = not kept or rng.random() < 0.5
    spec = replace(spec, own_embeddings=has_own, own_lm_head=has_own)
    if rng.random() < 0.4:
        window = rng.choice((4, 8, targets.WINDOW, 48))  # also the target's: its groups may take the head's layers
        some = [rng.choice((window, None)) for _ in range(spec.layers)] if V2 else []
        spec = replace(spec, windows=tuple(some) if any(some) else (window,) * spec.layers)
    return spec


def _settings(rng: random.Random, cell: Cell, head: tiny_heads.HeadSpec, target: str) -> Settings:
    block_size = rng.choice((BLOCK_SIZE, BLOCK_SIZE, 2 * BLOCK_SIZE))
    most = rng.randint(1, 12)
    # Layers with and without windows are in groups of their own, each of which takes blocks for a request. The smallest
    # group may be one layer.
    groups = 1 if target in SIMULATED and not any(head.windows) else 10
    per_request = groups * (-(-(MAX_MODEL_LEN + 2 * cell.k) // block_size) + 1)
    speculative: tuple[tuple[str, Any], ...] = ()
    if rng.random() < 0.25:
        cuts = sorted(rng.sample(range(1, most + 3), 2))
        ks = (cell.k, rng.randint(0, cell.k), rng.randint(0, cell.k))
        ranges = zip((1, cuts[0] + 1, cuts[1] + 1), (*cuts, most + 3), ks, strict=True)
        speculative += (("num_speculative_tokens_per_batch_size", list(ranges)),)
    if rng.random() < 0.15:
        speculative += (("draft_sample_method", "probabilistic"),)
    return replace(
        cell.settings(Path(), Path()),
        max_num_seqs=most,
        token_budget=1024 if cell.prefill == "whole" else rng.randint(most + cell.k + 3, 120),
        kv_blocks=most * per_request + 8 if cell.kv == "ample" else per_request + 1 + rng.randint(0, 5),
        speculative=speculative,
        llm=(("block_size", block_size), ("async_scheduling", rng.choice((None, False)))),
    )


def _graphs(rng: random.Random, settings: Settings) -> dict[str, Any] | None:
    if not V2 or rng.random() < 0.4:
        return None
    counts = range(1, settings.max_num_seqs + 1)
    sizes = [size for size in (16, 48, 96) if size <= 2 * settings.max_num_seqs * (settings.k + 1)]  # vLLM's limit
    return {
        "request_counts": sorted(rng.sample(counts, min(len(counts), rng.randint(1, 4)))),
        "sizes": rng.sample(sizes, rng.randint(0, len(sizes))),
        "mode": rng.choice(("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "FULL")),
        "in_place": rng.random() < 0.5,
        "kernel_blocks": rng.random() < 0.3,
    }


def _waves(rng: random.Random, kernels: bool, seed: int) -> list[tuple[Request, ...]]:
    waves = []
    for _ in range(1 if kernels else WAVES):
        chosen = rng.sample(range(POOL), rng.randint(8, 14) if V2 else rng.randint(8, 24))
        requests = []
        for number in chosen:
            arrives = rng.choice((0, rng.randint(0, 2 * len(chosen))))
            aborted = arrives + rng.randint(0, 12) if rng.random() < 0.08 else None
            requests.append(replace(pooled(seed // SEEDS_A_POOL, number), arrives=arrives, aborted=aborted))
        waves.append(tuple(requests))
    return waves


def pooled(pool: int, number: int) -> Request:
    """A request of a pool; some share their first blocks, some run to the end of their sequence."""
    rng = random.Random(f"pool {pool} {number}")
    shared = random.Random(f"pool {pool} {number % 2}")
    length = rng.choice((1, 2, 5, 31, 32, 33, 100, *(rng.randint(3, 70) for _ in range(6)), MAX_MODEL_LEN - 9))
    prefix = [shared.randrange(3, tiny_heads.MASK_TOKEN) for _ in range(100)] if rng.random() < 0.3 else []
    tokens = [*prefix, *(rng.randrange(3, tiny_heads.MASK_TOKEN) for _ in range(length))][: MAX_MODEL_LEN - 3]
    room = MAX_MODEL_LEN - len(tokens)
    most = room if length > 100 or (rng.random() < 0.1 and room < 70) else min(room, rng.choice(ANSWERS))
    sampling = rng.choice([s for s in SAMPLINGS if dict(s).get("min_tokens", 0) <= most])
    return Request(f"{pool}.{number}", tuple(tokens), most, sampling=sampling)


def write(configuration: Configuration, folder: Path) -> tuple[Path, Path]:
    """The target, which others may have written before, and the head."""
    target = folder / configuration.target
    if not target.exists() and configuration.target in SIMULATED:
        tiny_heads.write_target(target, configuration.target)
    elif not target.exists():
        targets.write(folder, configuration.target)
    return target, tiny_heads.write_head(folder / f"head-{configuration.seed}", target, configuration.head)
