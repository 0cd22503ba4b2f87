"""Do sampled tokens follow the target's distribution? Two z-scores that see the faults that matter.

Each sampled token x comes with the target's own conditional distribution p at the requested
temperature (plain torch, no speculation). If sampling is exact, then for any function f,
sum(f(x) - E_p f) is a martingale, and divided by the root of the summed variances it is a
standard normal, however the tokens depend on each other. f is

    log p(x): the score of the temperature, so the most powerful test of a wrong one;
    p(x):     grows when likely tokens come too often, as they do when a refused draft is
              replaced by a draw from p instead of from the residual distribution.
"""

from dataclasses import dataclass

import torch

LIMIT = 4.5  # |z| beyond it: one false alarm in 150,000 tests


@dataclass
class Tally:
    """Sums over all tokens judged so far."""

    num_tokens: int = 0
    score: float = 0.0
    score_variance: float = 0.0
    mass: float = 0.0
    mass_variance: float = 0.0

    def add(self, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> None:
        """Judge tokens by the distributions they should have come from.

        Args:
            logits: [n, vocab] float32 of the target before temperature.
            tokens: [n] sampled tokens.
        """
        log_p = (logits.double() / temperature).log_softmax(-1)
        p = log_p.exp()
        log_p = log_p.clamp(min=-1e4)  # a token that cannot come, and one that did all the same
        self.num_tokens += len(tokens)
        for f, name in ((log_p, "score"), (p, "mass")):
            mean = (p * f).sum(-1)
            variance = (p * (f - mean[:, None]) ** 2).sum(-1)
            drawn = f.gather(-1, tokens[:, None].long())[:, 0]
            setattr(self, name, getattr(self, name) + float((drawn - mean).sum()))
            setattr(self, f"{name}_variance", getattr(self, f"{name}_variance") + float(variance.sum()))

    @property
    def z(self) -> tuple[float, float]:
        """z-scores of log p and of p. Positive: likely tokens come too often (temperature too low)."""
        return self.score / self.score_variance**0.5, self.mass / self.mass_variance**0.5

    @property
    def follows_target(self) -> bool:
        return max(abs(z) for z in self.z) < LIMIT

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens, z(log p) = {self.z[0]:+.2f}, z(p) = {self.z[1]:+.2f}"


def limited(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """-inf for what a request cannot say: top-k first, then top-p of what is left."""
    best, order = (logits / temperature).sort(-1, descending=True)
    best[:, top_k or len(best[0]) :] = -float("inf")
    p = best.softmax(-1)
    best[p.cumsum(-1) - p >= top_p] = -float("inf")
    return torch.where(best.gather(-1, order.argsort(-1)) > -float("inf"), logits, -float("inf"))
