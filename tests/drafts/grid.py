"""What the draft tests vary, and the engines and requests that follow: of a pairwise grid, and of the fuzzer."""

import random
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

from peagle_vllm import lookup
from tests.conftest import ARM
from tests.support.engines import BLOCK_SIZE, Request, Settings
from tests.support.random_heads import MASK_TOKEN, VOCAB, HeadSpec

V2 = ARM == "plugin-v2"
MAX_MODEL_LEN = 160
SLOTS = 4  # max_num_seqs
# The reference computes their hidden states itself; of other targets it takes those that vLLM captured.
SIMULATED = ("llama", "qwen3", "qwen3_moe")
AUX_LAYERS = {2: (0, 8), 3: (2, 4, 5), 4: (1, 3, 5, 7), 5: (1, 2, 4, 6, 8)}


def choice(*choices: Any, rare: tuple[Any, ...] = ()) -> Any:
    """A factor: every two ``choices`` of different factors meet in ``pairwise_cells``, the fuzzer draws all."""
    return field(metadata={"choices": choices, "all": (*choices, *rare)})


@dataclass(frozen=True)
class Cell:
    k: int = choice(1, 2, 3, 5, 7, 8, 11, 18, rare=(4, 6, 9, 13))  # a public head was trained 18 deep
    fmt: str = choice("speculators", "aws", "served")  # served: the speculators head is itself the served model
    requests: int = choice(1, 4, 9)
    # V1 cannot group the layers of a GPT-OSS, nor those of a head of which only some slide.
    target: str = choice("llama", "qwen3", rare=("qwen3_moe", "mistral", *["gpt_oss"] * V2))
    family: str = choice("llama", "qwen3")  # of the head
    dtype: str = choice("float32", "bfloat16")
    draft_vocab: int = choice(VOCAB, 200)
    prefill: str = choice("whole", "chunked")
    prefix_caching: bool = choice(False, True)
    kv: str = choice("ample", "tight")  # tight: too few blocks for the requests, so some are preempted
    block_size: int = choice(BLOCK_SIZE, 2 * BLOCK_SIZE)
    scheduling: str = choice("asynchronous", "synchronous")
    layers: int = choice(2, 3, rare=(1, 4))
    aux: int = choice(3, 4, rare=(2, 5))  # a key of AUX_LAYERS
    norms: str = choice("plain", "rich")
    shares: bool = choice(False, True)  # embeddings and lm_head with the target
    selector: bool = choice(False, True)
    lookup: int = choice(0, 0, lookup.DEFAULT)  # drafts of requests that repeat themselves are looked up
    window: int = choice(0, 0, 24, rare=(8, 32, 48))  # 32 is the window of a Mistral's and a GPT-OSS' layers, too
    mixed: bool = choice(False, *[True] * V2)  # each second layer has no window
    weights: str = choice("loaded", "loaded", "updated")  # the head served first is another one of the same shape
    drafts: str = choice("greedy", "greedy", "probabilistic")
    schedule: bool = choice(False, False, True)  # fewer drafts the more requests run
    graphs: str = choice("", *["FULL_AND_PIECEWISE"] * V2, rare=("FULL_DECODE_ONLY", "PIECEWISE", "FULL") * V2)

    def __str__(self) -> str:
        words = {name: getattr(self, name) for name in FACTORS}
        words = {name: word if isinstance(word, str) else f"{name}{word}" for name, word in words.items() if word}
        return "-".join(words.values()).replace("True", "")

    def possible(self) -> "Cell":
        """The same, without what does not go together."""
        cell = self
        if cell.dtype == "bfloat16":
            # A rounded gate moves a selector's scores by more than rounding moves logits, the best logits are often
            # equal, and each layer rounds again: from three on, one row in thousands differs by 3 ulp, as stock vLLM's.
            cell = replace(cell, selector=False, drafts="greedy", layers=min(cell.layers, 2))
            # Mask rows that see no other row are alike, so that roundings decide.
            cell = cell if cell.window >= cell.k else replace(cell, window=0)
        if cell.fmt == "aws":  # no trainer publishes these names of tensors
            cell = replace(cell, weights="loaded")
        if cell.fmt == "served":  # the head names a target of its own family
            cell = replace(cell, target=cell.family)
        if cell.target not in SIMULATED:  # the reference has no weights of it
            cell = replace(cell, shares=False)
        return cell if cell.window else replace(cell, mixed=False)

    def head_spec(self) -> HeadSpec:
        aws, rich = self.fmt == "aws", self.norms == "rich"
        return HeadSpec(
            family=self.family,
            fmt="aws" if aws else "speculators",
            draft_vocab=self.draft_vocab,
            layers=self.layers,
            windows=tuple(None if self.mixed and i % 2 else self.window or None for i in range(self.layers)),
            norm_before_residual=rich,
            norm_before_fc=rich,
            fc_norm=rich and aws,  # vLLM 0.32 reads fc_norm from a flat config only
            biases=rich,
            own_embeddings=not self.shares,
            own_lm_head=not self.shares,
            spread=0.7 if self.dtype == "bfloat16" else 0.0,
            gentle=self.dtype == "bfloat16",
            selector=self.selector,
            aux_layers=AUX_LAYERS[self.aux],
        )

    def settings(self, target: Path, head: Path) -> Settings:
        # Layers with and without windows are in groups of their own, each of which takes blocks for a request. The
        # smallest group may be one layer.
        groups = 10 if self.mixed or self.target not in SIMULATED else 1
        of_a_request = groups * (-(-(MAX_MODEL_LEN + 2 * self.k) // self.block_size) + 1)
        schedule = [(1, 1, self.k), (2, 3, self.k - self.k // 2), (4, SLOTS, self.k // 3)]
        return Settings(
            target,
            head,
            k=self.k,
            max_num_seqs=SLOTS,
            max_model_len=MAX_MODEL_LEN,
            token_budget=1024 if self.prefill == "whole" else 48,
            kv_blocks=of_a_request * (SLOTS + 2 if self.kv == "ample" else 2),
            prefix_caching=self.prefix_caching,
            dtype=self.dtype,
            serve_head=self.fmt == "served",
            lookup=self.lookup,
            speculative=(
                *[("draft_sample_method", "probabilistic")] * (self.drafts == "probabilistic"),
                *[("num_speculative_tokens_per_batch_size", schedule)] * self.schedule,
            ),
            llm=(("block_size", self.block_size), ("async_scheduling", self.scheduling == "asynchronous")),
        )


FACTORS: dict[str, tuple[Any, ...]] = {factor.name: factor.metadata["choices"] for factor in fields(Cell)}
ALL_CHOICES: dict[str, tuple[Any, ...]] = {factor.name: factor.metadata["all"] for factor in fields(Cell)}


def random_cell(rng: random.Random, factors: dict[str, tuple[Any, ...]], **fixed: Any) -> Cell:
    return Cell(**{name: rng.choice(choices) for name, choices in factors.items()} | fixed).possible()


def pairs(cell: Cell) -> set[tuple[Any, ...]]:
    """Every pair of choices that a cell makes."""
    return {(a, getattr(cell, a), b, getattr(cell, b)) for a, b in combinations(FACTORS, 2)}


def pairwise_cells() -> list[Cell]:
    """Cells in which every two choices of different factors meet; greedy, the same list every time."""
    rng = random.Random(0)
    first = {name: choices[0] for name, choices in FACTORS.items()}
    every = {(a, x, b, y) for a, b in combinations(FACTORS, 2) for x, y in product(FACTORS[a], FACTORS[b])}
    missing = {(a, x, b, y) for a, x, b, y in every if (a, x, b, y) in pairs(Cell(**first | {a: x, b: y}).possible())}
    cells: list[Cell] = []
    while missing:
        a, x, b, y = min(missing, key=str)
        tries = [random_cell(rng, FACTORS, **{a: x, b: y}) for _ in range(400)]
        # float32 where there is a choice: only there the output is compared, too.
        cells.append(max(tries, key=lambda cell: (len(pairs(cell) & missing), cell.dtype == "float32")))
        missing -= pairs(cells[-1])
    return cells


# Own tokens of a prompt, whether they follow a beginning that others share, whether the request runs to MAX_MODEL_LEN.
KINDS = (
    (37, False, False),
    (20, True, False),
    (MAX_MODEL_LEN - 15, False, True),
    (5, False, False),
    (1, False, False),  # vLLM pads a prompt of one token with K placeholder drafts
    (9, True, False),
    (MAX_MODEL_LEN - 6, False, True),
    (64, False, False),
    (32, True, True),
)
POOL = 4 * len(KINDS)
TOP_1 = (("temperature", 1.5), ("top_k", 1))  # drawn where nothing but the best is left
SAMPLINGS: tuple[tuple[tuple[str, Any], ...], ...] = (
    *((),) * 6,
    *(TOP_1,) * 2,
    (("repetition_penalty", 1.3), ("presence_penalty", 0.5)),
    (("ignore_eos", False), ("stop_token_ids", list(range(3, 60)))),
    # vLLM's V1 masks stop tokens in the last row of a step although the drafts before it reach min_tokens.
    (("stop_token_ids", list(range(60, 100))), ("min_tokens", 3 if V2 else 0)),
    (("logprobs", 2),),
    (("temperature", 0.3),),
    # vLLM's V1 rewinds a seed's generator after a chunk of a prompt, which a CPU's cannot do.
    (("temperature", 1.0), ("top_p", 0.9), *((("seed", 5),) if V2 else ())),
)


def request(number: int, size: int) -> Request:
    """A request of the kind that its number tells; ``size`` output tokens, or as many as there is room for."""

    def tokens(length: int, seed: str) -> tuple[int, ...]:
        rng = random.Random(seed)
        return tuple(rng.randrange(3, MASK_TOKEN) for _ in range(length))

    turn, kind = divmod(number, len(KINDS))
    length, is_shared, is_long = KINDS[kind]
    # Three whole blocks; vLLM recomputes the last one that fits, for its hidden states.
    prompt = tokens(100 if is_shared else 0, "shared") + tokens(length + turn, str(number))
    room = MAX_MODEL_LEN - len(prompt)
    return Request(str(number), prompt, room if is_long else min(room, size))


def requests(count: int, size: int) -> list[Request]:
    """Greedy ones of the kinds in turn, one after the other."""
    return [replace(request(i, size), arrives=max(0, 2 * i - 5)) for i in range(count)]


def pooled(number: int, size: int) -> Request:
    """The request of this number, from 0 to POOL - 1, with the sampling parameters that it always has."""
    return replace(request(number, size), sampling=random.Random(number).choice(SAMPLINGS))


def traffic(rng: random.Random, count: int, size: int) -> list[Request]:
    """Some of the pool: when they arrive, and when a few are aborted, is drawn."""
    drawn = []
    for number in rng.sample(range(POOL), count):
        arrives = rng.choice((0, rng.randint(0, 2 * count)))
        aborted = arrives + rng.randint(0, 12) if count > 1 and rng.random() < 0.08 else None
        drawn.append(replace(pooled(number, size), arrives=arrives, aborted=aborted))
    return drawn
