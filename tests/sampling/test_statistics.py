"""The statistic itself, on tokens drawn in plain torch: right sampling passes, known faults do not."""

import torch

from tests.sampling.statistics import Tally

N, VOCAB, TEMPERATURE = 4000, 64, 0.8


def drawn_with(temperature: float, recover_from: str = "residual") -> Tally:
    """Draw N tokens by speculative sampling with one greedy draft token each, and judge them at TEMPERATURE."""
    rng = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn(N, VOCAB, generator=rng)
    p = (logits / temperature).softmax(-1)
    draft = (logits + torch.randn(N, VOCAB, generator=rng)).argmax(-1)
    accepted = torch.rand(N, generator=rng) < p.gather(-1, draft[:, None])[:, 0]
    residual = p.scatter(-1, draft[:, None], 0.0) if recover_from == "residual" else p
    recovered = torch.multinomial(residual, 1, generator=rng)[:, 0]
    tally = Tally()
    tally.add(logits, torch.where(accepted, draft, recovered), TEMPERATURE)
    return tally


def test_exact_speculative_sampling_passes():
    tally = drawn_with(TEMPERATURE)
    assert tally.follows_target, tally


def test_a_temperature_off_by_ten_percent_is_seen():
    assert not drawn_with(TEMPERATURE * 1.1).follows_target
    assert not drawn_with(TEMPERATURE / 1.1).follows_target


def test_missing_residual_resampling_is_seen():
    assert not drawn_with(TEMPERATURE, recover_from="target").follows_target
