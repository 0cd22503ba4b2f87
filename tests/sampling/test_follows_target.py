"""Speculative sampling in the engine draws from the target's distribution, and the test would notice if not."""

import itertools
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from peagle_vllm.lookup import DEFAULT as DEFAULT_LOOKUP
from tests.conftest import ARM
from tests.sampling.statistics import Tally, limited
from tests.support import random_heads as tiny_heads
from tests.support.engines import Engine, Finished, Request, Settings, engine
from tests.support.models import PEAGLE, TARGET, prompt_token_ids
from tests.support.reference import ROUND, Target

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

V2 = ARM == "plugin-v2"
TEMPERATURES = (0.7, 1.2)
K, MAX_TOKENS = 5, 40
# Sampled tokens over all cases, as the two runners' speeds allow: V2 runs under Triton's interpreter.
NUM_TOKENS = 400 if V2 else 2_500
# Of the requests in a batch, in turn.
LIMITS: tuple[dict[str, float], ...] = ({}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 8, "top_p": 0.9})

# Drafts of the shipped head, and of the same with a random selector that outweighs the head's logits: a q that is not
# the selector's own then shows. Last, with drafts that are looked up. There the selector is weak, so that most drafts
# are accepted: a q that is the head's shows.
DRAFTS = ("greedy", "probabilistic", "probabilistic, sharpened")
LOOKED_UP = "probabilistic, sharpened, looked up"


def marks_on_v2(drafts: str) -> Any:
    """Under the interpreter plain probabilistic drafts are enough of ``make test``."""
    return pytest.mark.full if V2 and drafts not in ("probabilistic", LOOKED_UP) else ()


@pytest.fixture(scope="module")
def sharpened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two heads, by the strength of their selectors."""
    folder = tmp_path_factory.mktemp("sharpened")
    for name, selector in {"strong": {"candidates": 8}, "weak": {"scale": 0.05, "candidates": 2}}.items():
        shutil.copytree(PEAGLE, folder / name)
        tiny_heads.write_selector(folder / name, torch.Generator().manual_seed(0), **selector)
    return folder


def settings(drafts: str, sharpened: Path) -> Settings:
    draft_sample_method, *more = drafts.split(", ")
    lookup = DEFAULT_LOOKUP if "looked up" in more else 0
    head = sharpened / ("weak" if lookup else "strong") if "sharpened" in more else PEAGLE
    speculative = (("draft_sample_method", draft_sample_method),)
    return Settings(TARGET, head, k=K, max_num_seqs=8, lookup=lookup, speculative=speculative)


def sample(live: Engine, num_tokens: int, temperature: float, seeded: bool) -> list[Finished]:
    """Answers of requests whose limits are those of ``LIMITS``, in turn."""
    requests = []
    for i, tokens in zip(range(-(-num_tokens // MAX_TOKENS)), itertools.cycle(prompt_token_ids()), strict=False):
        sampling = {"temperature": temperature, **({"seed": i} if seeded else {}), **LIMITS[i % len(LIMITS)]}
        name = f"{temperature}-{seeded}-{i}"
        requests.append(Request(name, tuple(tokens), MAX_TOKENS, sampling=tuple(sampling.items())))
    finished = live.run(requests)
    return [finished[request.id] for request in requests]


@torch.no_grad()
def judge(finished: list[Finished], temperature: float, *tallies: Tally) -> None:
    target = Target(TARGET, ROUND["float32"])
    for done, limit in zip(finished, itertools.cycle(LIMITS), strict=False):
        tokens = torch.tensor(done.tokens)
        logits = target.logits(target.states(tokens[:-1])[-1])[-len(done.output) :]
        for tally in tallies:
            tally.add(limited(logits, temperature, **limit), tokens[-len(done.output) :], temperature)


@pytest.mark.parametrize(
    ("drafts", "num_tokens"),
    [
        *(pytest.param(d, NUM_TOKENS, id=d, marks=marks_on_v2(d)) for d in DRAFTS),
        pytest.param(LOOKED_UP, NUM_TOKENS * 2 // 5, id=LOOKED_UP),
        *(pytest.param(d, NUM_TOKENS * 10, id=f"{d}, many", marks=pytest.mark.full) for d in (*DRAFTS, LOOKED_UP)),
    ],
)
def test_sampled_tokens_follow_the_target(drafts: str, num_tokens: int, sharpened: Path):
    """Half of the tokens at each temperature, half of those from seeded requests."""
    live, together = engine(settings(drafts, sharpened)), Tally()
    for temperature, seeded in itertools.product(TEMPERATURES, (False, True)):
        finished, tally = sample(live, num_tokens // 8, temperature, seeded), Tally()
        judge(finished, temperature, tally, together)
        print(f"{ARM} {drafts} drafts, temperature {temperature}, seeded {seeded}: {tally}")
        assert tally.follows_target, tally
    print(f"{ARM} {drafts} drafts: {together}")
    assert together.follows_target, together


@pytest.mark.parametrize("drafts", [pytest.param(drafts, marks=marks_on_v2(drafts)) for drafts in DRAFTS])
def test_a_seeded_request_repeats_itself(drafts: str, sharpened: Path):
    """Alone, again, and among other requests."""
    live, length = engine(settings(drafts, sharpened)), 12 if V2 else 24
    prompts, hot = prompt_token_ids(), ("temperature", 1.0)

    def once(tag: str, others: int = 0) -> list[int]:
        requests = [Request(tag, tuple(prompts[0]), length, sampling=(hot, ("seed", 1234)))]
        requests += [Request(f"{tag}-{i}", tuple(prompts[i]), length, sampling=(hot,)) for i in range(1, others + 1)]
        return live.run(requests)[tag].output

    first = once(f"{drafts}-a")
    assert once(f"{drafts}-b") == first
    assert once(f"{drafts}-c", others=3) == first


@pytest.mark.parametrize("drafts", DRAFTS[1:])
def test_drafts_are_within_the_limits(drafts: str, sharpened: Path):
    """Under top-k 1, or top-p 0, they are those of a greedy request: it takes as many steps to the same text."""
    live, hot = engine(settings(drafts, sharpened)), ("temperature", 1.5)

    def told(*sampling: tuple[str, float]) -> tuple[list[list[int]], int]:
        """Answers, and the number of steps."""
        requests = [Request(f"{sampling}-{i}", tuple(prompt_token_ids()[i]), 20, sampling=sampling) for i in (0, 1)]
        with patch.object(live.llm.llm_engine, "step", wraps=live.llm.llm_engine.step) as step:
            return [live.run([request])[request.id].output for request in requests], step.call_count

    assert told(hot, ("top_k", 1)) == told(hot, ("top_p", 1e-6)) == told()
