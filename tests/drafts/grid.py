"""What the draft tests vary, and the engines and requests that follow from it."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

from peagle_vllm import lookup
from tests.support import random_heads as tiny_heads
from tests.support.engines import Request, Settings

MAX_MODEL_LEN = 160


def choice(*choices: Any) -> Any:
    return field(metadata={"choices": choices})


@dataclass(frozen=True)
class Cell:
    """One choice of every factor."""

    k: int = choice(1, 2, 3, 5, 7, 8, 11, 18)  # a public head was trained 18 deep
    fmt: str = choice("speculators", "aws", "served")  # served: the speculators head is itself the served model
    requests: int = choice(1, 4, 9)  # in four slots
    family: str = choice("llama", "qwen3")
    dtype: str = choice("float32", "bfloat16")
    draft_vocab: int = choice(tiny_heads.VOCAB, 200)
    prefill: str = choice("whole", "chunked")
    prefix_caching: bool = choice(False, True)
    kv: str = choice("ample", "tight")  # tight: too few blocks for the requests, so some are preempted
    norms: str = choice("plain", "rich")
    selector: bool = choice(False, True)
    lookup: int = choice(0, 0, lookup.DEFAULT)  # drafts of requests that repeat themselves are looked up
    window: int = choice(0, 0, 24)
    weights: str = choice("loaded", "loaded", "updated")  # the head served first is another one of the same shape
    drafts: str = choice("greedy", "greedy", "top-k 1")  # drawn, at a temperature, where nothing but the best is left

    def __str__(self) -> str:
        words = [f"K{self.k}", self.fmt, self.family, self.dtype, f"{self.requests}req", f"vocab{self.draft_vocab}"]
        words += [self.prefill, self.kv, self.norms] + ["cache"] * self.prefix_caching + ["selector"] * self.selector
        words += [f"lookup{self.lookup}"] * bool(self.lookup) + [f"window{self.window}"] * bool(self.window)
        words += ["top-k"] * self.is_drawn + ["updated"] * self.is_updated
        return "-".join(words)

    @property
    def is_drawn(self) -> bool:
        """Whether some requests are drawn. Not in bfloat16, where the best logits are often equal."""
        return self.drafts == "top-k 1" and self.dtype == "float32"

    @property
    def is_updated(self) -> bool:
        """Not with AWS's names of tensors, which no trainer publishes."""
        return self.weights == "updated" and self.fmt != "aws"

    def head_spec(self) -> tiny_heads.HeadSpec:
        aws, rich = self.fmt == "aws", self.norms == "rich"
        layers = 3 if rich else 2
        return tiny_heads.HeadSpec(
            family=self.family,
            fmt="aws" if aws else "speculators",
            draft_vocab=self.draft_vocab,
            layers=layers,
            windows=(self.window,) * layers if self.window else (),
            norm_before_residual=rich,
            norm_before_fc=rich,
            fc_norm=rich and aws,  # vLLM 0.32 reads fc_norm from a flat config only
            biases=rich,
            own_embeddings=not rich,
            spread=0.7 if self.dtype == "bfloat16" else 0.0,
            gentle=self.dtype == "bfloat16",
            selector=self.selector,
        )

    def settings(self, target: Path, head: Path) -> Settings:
        return Settings(
            target,
            head,
            k=self.k,
            max_model_len=MAX_MODEL_LEN,
            token_budget=1024 if self.prefill == "whole" else 48,
            # With a window the head's layers are a group, and the target's several: each takes blocks for a request.
            kv_blocks=(64 if self.kv == "ample" else 13) * (5 if self.window else 1),
            prefix_caching=self.prefix_caching,
            dtype=self.dtype,
            serve_head=self.fmt == "served",
            lookup=self.lookup,
            speculative=(("draft_sample_method", "probabilistic"),) * self.is_drawn,
        )


FACTORS: dict[str, tuple] = {factor.name: factor.metadata["choices"] for factor in fields(Cell)}


def pairs(cell: Cell) -> set[tuple]:
    """Every pair of choices that a cell makes."""
    return {(a, getattr(cell, a), b, getattr(cell, b)) for a, b in combinations(FACTORS, 2)}


def pairwise_cells() -> list[Cell]:
    """Cells in which every two choices of different factors meet; greedy, the same list every time."""
    rng = random.Random(0)
    missing = {(a, x, b, y) for a, b in combinations(FACTORS, 2) for x, y in product(FACTORS[a], FACTORS[b])}
    cells: list[Cell] = []
    while missing:
        a, x, b, y = min(missing, key=str)
        tries = [Cell(**{f: rng.choice(c) for f, c in FACTORS.items()} | {a: x, b: y}) for _ in range(400)]
        # float32 where there is a choice: only there the output is compared, too.
        cells.append(max(tries, key=lambda cell: (len(pairs(cell) & missing), cell.dtype == "float32")))
        missing -= pairs(cells[-1])
    # One target after the other, so that the engine without speculation starts once for each.
    return sorted(cells, key=lambda cell: (cell.family, cell.dtype))


def requests(count: int, size: int) -> list[Request]:
    """1, 4 or 9 requests; from 4 on, some run to MAX_MODEL_LEN beside others that do not.

    Args:
        size: output tokens of a request that does not.
    """
    rng = random.Random(f"{count}:0")

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, tiny_heads.MASK_TOKEN) for _ in range(length))

    shared = prompt(100)  # three whole blocks; vLLM recomputes the last one that fits, for its hidden states

    def plans() -> Iterator[tuple[tuple[int, ...], int]]:
        yield prompt(37), size
        yield shared + prompt(20), size
        yield prompt(MAX_MODEL_LEN - size // 2), MAX_MODEL_LEN  # to the end
        yield prompt(5), size
        yield prompt(1), size  # vLLM pads a prompt of one token with K placeholder drafts
        yield shared + prompt(9), size
        yield prompt(MAX_MODEL_LEN - 3), MAX_MODEL_LEN
        yield prompt(64), size // 2
        yield shared + prompt(14), MAX_MODEL_LEN

    requests = []
    for i, (tokens, max_tokens) in zip(range(count), plans(), strict=False):
        room = MAX_MODEL_LEN - len(tokens)
        requests.append(Request(f"{count}.{i}", tokens, min(max_tokens, room), arrives=max(0, 2 * i - 5)))
    return requests


def without_stock_defects(requests: list[Request]) -> list[Request]:
    """The same requests, none of which comes near MAX_MODEL_LEN: stock V1 drafts for nobody then."""
    room = MAX_MODEL_LEN - 2 * max(FACTORS["k"]) - 1
    requests = [replace(r, prompt=r.prompt[: room - 8]) for r in requests]
    return [replace(r, max_tokens=min(r.max_tokens, room - len(r.prompt))) for r in requests]
