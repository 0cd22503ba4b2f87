"""Speculative sampling in the engine draws from the target's distribution, and the test would notice if not."""

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch.utils import _pytree as pytree

from peagle_vllm.lookup import DEFAULT as DEFAULT_LOOKUP
from tests.conftest import ARM
from tests.sampling.statistics import Tally, limited
from tests.support import random_heads as tiny_heads
from tests.support.engines import Engine, Finished, Request, Settings, engine
from tests.support.models import PEAGLE, TARGET, prompt_token_ids
from tests.support.operations import Operations
from tests.support.reference import ROUND, Target

TEMPERATURES = (0.7, 1.2)
K = 5
# Sampled tokens over all cases, as the two runners' speeds allow: V2 runs under Triton's interpreter.
NUM_TOKENS = {"plugin-v1": 5_000, "plugin-v2": 400}
NUM_TOKENS_LOOKED_UP = {"plugin-v1": 2_000, "plugin-v2": 160}
NUM_TOKENS_FULL = {"plugin-v1": 50_000, "plugin-v2": 5_000}
MAX_TOKENS = 40
# Of the requests in a batch, in turn.
LIMITS: tuple[dict[str, float], ...] = ({}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 8, "top_p": 0.9})

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")


# Drafts of the shipped head, and of the same with a random selector that outweighs the head's logits: a q that is not
# the selector's own then shows. Last, with drafts that are looked up. There the selector is weak, so that most drafts
# are accepted: a q that is the head's shows.
DRAFTS = ("greedy", "probabilistic", "probabilistic, sharpened")
LOOKED_UP = ("probabilistic, looked up", "probabilistic, sharpened, looked up")


def marks_on_v2(drafts: str) -> Any:
    """Under the interpreter plain probabilistic drafts are enough of ``make test``."""
    return pytest.mark.full if ARM == "plugin-v2" and drafts != "probabilistic" else ()


@pytest.fixture(scope="module")
def sharpened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two heads, by the strength of their selectors."""
    folder = tmp_path_factory.mktemp("sharpened")
    for name, selector in {"strong": {"candidates": 8}, "weak": {"scale": 0.05, "candidates": 2}}.items():
        shutil.copytree(PEAGLE, folder / name)
        tiny_heads.write_selector(folder / name, torch.Generator().manual_seed(0), **selector)
    return folder


def settings(drafts: str, sharpened: Path | None = None) -> Settings:
    draft_sample_method, *more = drafts.split(", ")
    lookup = DEFAULT_LOOKUP if "looked up" in more else 0
    head = sharpened / ("weak" if lookup else "strong") if sharpened and "sharpened" in more else PEAGLE
    speculative = (("draft_sample_method", draft_sample_method),)
    return Settings(TARGET, head, k=K, max_num_seqs=8, lookup=lookup, speculative=speculative)


def sample(
    live: Engine, num_tokens: int, temperature: float, seeded: bool, tag: str, limits: tuple[dict, ...] = ({},)
) -> list[Finished]:
    """Answers of requests whose limits are those of ``limits``, in turn."""
    requests = []
    for i, tokens in zip(range(-(-num_tokens // MAX_TOKENS)), itertools.cycle(prompt_token_ids()), strict=False):
        sampling = {"temperature": temperature, **({"seed": i} if seeded else {}), **limits[i % len(limits)]}
        requests.append(Request(f"{tag}-{i}", tuple(tokens), MAX_TOKENS, sampling=tuple(sampling.items())))
    finished = live.run(requests)
    return [finished[request.id] for request in requests]


@torch.no_grad()
def judge(finished: list[Finished], temperature: float, limits: tuple[dict, ...] = ({},)) -> Tally:
    target, tally = Target(TARGET, ROUND["float32"]), Tally()
    for done, limit in zip(finished, itertools.cycle(limits), strict=False):
        tokens = torch.tensor(done.tokens)
        logits = target.logits(target.states(tokens[:-1])[-1])[-len(done.output) :]
        tally.add(limited(logits, temperature, **limit), tokens[-len(done.output) :], temperature)
    return tally


@pytest.mark.parametrize(
    ("drafts", "num_tokens"),
    [
        *(pytest.param(drafts, NUM_TOKENS, id=drafts, marks=marks_on_v2(drafts)) for drafts in DRAFTS),
        pytest.param(LOOKED_UP[1], NUM_TOKENS_LOOKED_UP, id=LOOKED_UP[1]),
        *(
            pytest.param(drafts, NUM_TOKENS_FULL, id=f"{drafts}, many", marks=pytest.mark.full)
            for drafts in DRAFTS + LOOKED_UP
        ),
    ],
)
def test_sampled_tokens_follow_the_target(drafts: str, num_tokens: dict[str, int], sharpened: Path):
    """Half of the tokens at each temperature, half of those from seeded requests."""
    live, together = engine(settings(drafts, sharpened)), Tally()
    for temperature, seeded in itertools.product(TEMPERATURES, (False, True)):
        finished = sample(live, num_tokens[ARM] // 8, temperature, seeded, f"{temperature}-{seeded}", LIMITS)
        tally = judge(finished, temperature, LIMITS)
        print(f"{ARM} {drafts} drafts, temperature {temperature}, seeded {seeded}: {tally}")
        assert tally.follows_target, tally
        together += tally
    print(f"{ARM} {drafts} drafts: {together}")
    assert together.follows_target, together


@pytest.mark.parametrize("drafts", [pytest.param(drafts, marks=marks_on_v2(drafts)) for drafts in DRAFTS])
def test_a_seeded_request_repeats_itself(drafts: str, sharpened: Path):
    """Alone, again, and among other requests."""
    live = engine(settings(drafts, sharpened))
    prompts = prompt_token_ids()
    seeded = (("temperature", 1.0), ("seed", 1234))

    def once(tag: str, companions: int = 0) -> list[int]:
        requests = [Request(tag, tuple(prompts[0]), 24, sampling=seeded)]
        requests += [
            Request(f"{tag}-{i}", tuple(prompts[i]), 24, sampling=(("temperature", 1.0),))
            for i in range(1, companions + 1)
        ]
        return live.run(requests)[tag].output

    first = once(f"{drafts}-a")
    assert once(f"{drafts}-b") == first
    assert once(f"{drafts}-c", companions=3) == first


@pytest.mark.parametrize("drafts", DRAFTS[1:])
def test_drafts_are_within_the_limits(drafts: str, sharpened: Path, monkeypatch: pytest.MonkeyPatch):
    """Under top-k 1, or top-p 0, they are those of a greedy request: it takes as many steps to the same text."""
    live, steps = engine(settings(drafts, sharpened)), Counter[str]()
    engine_step = live.llm.llm_engine.step

    def told(name: str, *sampling: tuple[str, float]) -> list[int]:
        def step():
            steps[name] += 1
            return engine_step()

        monkeypatch.setattr(live.llm.llm_engine, "step", step)
        requests = [
            Request(f"{drafts}-{name}-{i}", tuple(prompt_token_ids()[i]), 20, sampling=sampling) for i in (0, 1)
        ]
        return [live.run([request])[request.id].output for request in requests]

    greedy = told("greedy")
    hot = ("temperature", 1.5)
    assert told("top-k", hot, ("top_k", 1)) == told("top-p", hot, ("top_p", 1e-6)) == greedy
    assert len(set(steps.values())) == 1


@pytest.mark.arm("plugin-v1")
@pytest.mark.parametrize("fault", ["temperature", "residual"])
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch):
    """A temperature off by ten percent; a refused draft replaced by a draw from the target, not from the residual."""
    live, temperature = engine(settings("greedy")), 0.7
    from vllm.v1.sample import rejection_sampler

    def from_target(max_spec_len, num_drafts, cu_num_drafts, draft_token_ids, draft_probs, target_probs, *_):
        return torch.multinomial(target_probs, 1)[:, 0].to(draft_token_ids.dtype)

    if fault == "residual":
        monkeypatch.setattr(rejection_sampler, "sample_recovered_tokens", from_target)
    else:
        temperature *= 1.1
    finished = sample(live, NUM_TOKENS[ARM] // 2, temperature, False, fault)
    assert not judge(finished, 0.7).follows_target


@pytest.mark.arm("plugin-v2")
def test_a_plain_heads_logits_are_passed_over_once():
    live = engine(settings("probabilistic"))
    width = live.drafter.model.config.draft_vocab_size

    def reads_logits(operation: Any, values: Any) -> bool:
        shapes = [value.shape for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
        is_view = operation._schema.returns and operation._schema.returns[0].alias_info is not None
        is_wide = any(len(shape) == 2 and shape[1] == width for shape in shapes)
        return is_wide and not is_view and not any(width in shape[:1] for shape in shapes)

    passes, choose = Operations(reads_logits), Mock(wraps=live.drafter._choose)
    sampling = tuple({"temperature": 1.0, **LIMITS[-1]}.items())
    first, second = (Request(name, tuple(prompt_token_ids()[0]), 8, sampling=sampling) for name in ("first", "second"))
    live.run([first])  # in the first step, vLLM's top-k is tried on a row of zeros
    with patch.object(live.drafter, "_choose", passes.within(choose)), passes:
        live.run([second])
    for lm_head in ("aten::empty.memory_format", "_C::onednn_mm", "aten::mm", "aten::addmm", "aten::linear"):
        del passes.calls[lm_head]
    assert passes.calls == {"aten::topk": choose.call_count}
