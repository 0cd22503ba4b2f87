"""Speculative sampling in the engine draws from the target's distribution, and the test would notice if not."""

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from peagle_vllm.lookup import DEFAULT as DEFAULT_LOOKUP
from tests.conftest import ARM
from tests.sampling.statistics import Tally, limited
from tests.support import random_heads as tiny_heads
from tests.support.engines import Engine, Finished, Request, Settings, engine
from tests.support.models import PEAGLE, TARGET, prompt_token_ids
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


def full_on_v2(drafts: str) -> Any:
    """Under the interpreter the others are enough of ``make test``."""
    return pytest.param(drafts, marks=pytest.mark.full if ARM == "plugin-v2" else ())


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
    prompts = itertools.cycle(prompt_token_ids())
    requests = [
        Request(
            f"{tag}-{i}",
            tuple(next(prompts)),
            MAX_TOKENS,
            sampling=(
                ("temperature", temperature),
                *((("seed", i),) if seeded else ()),
                *limits[i % len(limits)].items(),
            ),
        )
        for i in range(-(-num_tokens // MAX_TOKENS))
    ]
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


def run_all(drafts: str, sharpened: Path, num_tokens: int) -> None:
    """Half of the tokens at each temperature, half of those from seeded requests."""
    live, together = engine(settings(drafts, sharpened)), Tally()
    for temperature, seeded in itertools.product(TEMPERATURES, (False, True)):
        finished = sample(live, num_tokens // 8, temperature, seeded, f"{temperature}-{seeded}", LIMITS)
        tally = judge(finished, temperature, LIMITS)
        print(f"{ARM} {drafts} drafts, temperature {temperature}, seeded {seeded}: {tally}")
        assert tally.follows_target, tally
        together += tally
    print(f"{ARM} {drafts} drafts: {together}")
    assert together.follows_target, together


@pytest.mark.parametrize("drafts", [full_on_v2(DRAFTS[0]), DRAFTS[1], full_on_v2(DRAFTS[2]), LOOKED_UP[1]])
def test_sampled_tokens_follow_the_target(drafts: str, sharpened: Path):
    run_all(drafts, sharpened, (NUM_TOKENS_LOOKED_UP if drafts in LOOKED_UP else NUM_TOKENS)[ARM])


@pytest.mark.full
@pytest.mark.parametrize("drafts", DRAFTS + LOOKED_UP)
def test_many_sampled_tokens_follow_the_target(drafts: str, sharpened: Path):
    run_all(drafts, sharpened, NUM_TOKENS_FULL[ARM])


@pytest.mark.parametrize("drafts", [full_on_v2(DRAFTS[0]), DRAFTS[1], full_on_v2(DRAFTS[2])])
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
def test_a_temperature_off_by_ten_percent_fails():
    finished = sample(engine(settings("greedy")), NUM_TOKENS[ARM] // 2, 0.7 * 1.1, False, "warm")
    assert not judge(finished, 0.7).follows_target


@pytest.mark.arm("plugin-v1")
def test_without_residual_resampling_it_fails(monkeypatch: pytest.MonkeyPatch):
    """A refused draft replaced by a draw from the target instead of from the residual."""
    live = engine(settings("greedy"))
    from vllm.v1.sample import rejection_sampler

    def from_target(
        max_spec_len, num_draft_tokens, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, *_
    ):
        return torch.multinomial(target_probs, 1)[:, 0].to(draft_token_ids.dtype)

    monkeypatch.setattr(rejection_sampler, "sample_recovered_tokens", from_target)
    finished = sample(live, NUM_TOKENS[ARM] // 2, 0.7, False, "no-residual")
    assert not judge(finished, 0.7).follows_target


class PassesOverLogits(TorchDispatchMode):
    """Names of the operations that read or write a tensor as wide as the vocabulary."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.names = width, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [tensor for tensor in pytree.tree_leaves((args, kwargs, out)) if isinstance(tensor, torch.Tensor)]
        is_view = func._schema.returns and func._schema.returns[0].alias_info is not None
        is_wide = any(tensor.dim() == 2 and tensor.shape[-1] == self.width for tensor in tensors)
        if is_wide and not is_view and not any(self.width in tensor.shape[:1] for tensor in tensors):
            self.names.append(func.name())
        return out


@pytest.mark.arm("plugin-v2")
def test_a_plain_heads_logits_are_passed_over_once():
    live = engine(settings("probabilistic"))
    choose, passes = live.drafter._choose, PassesOverLogits(live.drafter.model.config.draft_vocab_size)

    def counted(*args: Any) -> None:
        passes.names.clear()
        with passes:
            choose(*args)

    with patch.object(live.drafter, "_choose", counted):
        live.run(
            [
                Request(
                    "passes",
                    tuple(prompt_token_ids()[0]),
                    8,
                    sampling=tuple({"temperature": 1.0, **LIMITS[-1]}.items()),
                )
            ]
        )
    lm_head = {"aten::empty.memory_format", "_C::onednn_mm", "aten::mm", "aten::addmm", "aten::linear"}
    assert [name for name in passes.names if name not in lm_head] == ["aten::topk"]
