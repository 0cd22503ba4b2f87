"""Speculative sampling in the engine draws from the target's distribution, and the test would notice if not."""

import itertools

import pytest
import torch

from tests.conftest import ARM
from tests.drafts.reference import ROUND, Target
from tests.engines import Engine, Finished, Request, Settings, engine
from tests.models import PEAGLE, TARGET, prompt_token_ids
from tests.sampling.statistics import Tally

TEMPERATURES = (0.7, 1.2)
K = 5
# Sampled tokens over all cases, as the two runners' speeds allow: V2 runs under Triton's interpreter.
NUM_TOKENS = {"plugin-v1": 5_000, "plugin-v2": 600}
NUM_TOKENS_FULL = {"plugin-v1": 50_000, "plugin-v2": 5_000}
MAX_TOKENS = 40

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")


def settings(draft_sample_method: str) -> Settings:
    return Settings(TARGET, PEAGLE, k=K, max_num_seqs=8, speculative=(("draft_sample_method", draft_sample_method),))


def sample(live: Engine, num_tokens: int, temperature: float, seeded: bool, tag: str) -> list[Finished]:
    prompts = itertools.cycle(prompt_token_ids())
    requests = [
        Request(
            f"{tag}-{i}",
            tuple(next(prompts)),
            MAX_TOKENS,
            sampling=(("temperature", temperature), *((("seed", i),) if seeded else ())),
        )
        for i in range(-(-num_tokens // MAX_TOKENS))
    ]
    return list(live.run(requests).values())


@torch.no_grad()
def judge(finished: list[Finished], temperature: float) -> Tally:
    target, tally = Target(TARGET, ROUND["float32"]), Tally()
    for done in finished:
        tokens = torch.tensor(done.tokens)
        logits = target.logits(target.states(tokens[:-1])[-1])
        tally.add(logits[-len(done.output) :], tokens[-len(done.output) :], temperature)
    return tally


def run_all(draft_sample_method: str, num_tokens: int) -> None:
    """Half of the tokens at each temperature, half of those from seeded requests."""
    live, together = engine(settings(draft_sample_method)), Tally()
    for temperature, seeded in itertools.product(TEMPERATURES, (False, True)):
        tally = judge(sample(live, num_tokens // 8, temperature, seeded, f"{temperature}-{seeded}"), temperature)
        print(f"{ARM} {draft_sample_method} drafts, temperature {temperature}, seeded {seeded}: {tally}")
        assert tally.follows_target, tally
        together += tally
    print(f"{ARM} {draft_sample_method} drafts: {together}")
    assert together.follows_target, together


@pytest.mark.parametrize("draft_sample_method", ["greedy", "probabilistic"])
def test_sampled_tokens_follow_the_target(draft_sample_method: str):
    run_all(draft_sample_method, NUM_TOKENS[ARM])


@pytest.mark.full
@pytest.mark.parametrize("draft_sample_method", ["greedy", "probabilistic"])
def test_many_sampled_tokens_follow_the_target(draft_sample_method: str):
    run_all(draft_sample_method, NUM_TOKENS_FULL[ARM])


@pytest.mark.parametrize("draft_sample_method", ["greedy", "probabilistic"])
def test_a_seeded_request_repeats_itself(draft_sample_method: str):
    """Alone, again, and among other requests."""
    live = engine(settings(draft_sample_method))
    prompts = prompt_token_ids()
    seeded = (("temperature", 1.0), ("seed", 1234))

    def once(tag: str, companions: int = 0) -> list[int]:
        requests = [Request(tag, tuple(prompts[0]), 24, sampling=seeded)]
        requests += [
            Request(f"{tag}-{i}", tuple(prompts[i]), 24, sampling=(("temperature", 1.0),))
            for i in range(1, companions + 1)
        ]
        return live.run(requests)[tag].output

    first = once(f"{draft_sample_method}-a")
    assert once(f"{draft_sample_method}-b") == first
    assert once(f"{draft_sample_method}-c", companions=3) == first


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
    finished = sample(live, NUM_TOKENS[ARM], 0.7, False, "no-residual")
    assert not judge(finished, 0.7).follows_target
