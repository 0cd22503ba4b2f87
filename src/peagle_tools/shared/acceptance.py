"""What was drafted and what of it was accepted, from vLLM's counters: the one meter of every tool here.

    acceptance length = 1 + accepted draft tokens / drafts        the 1 is the bonus token
    share at position i = drafts whose first i tokens were accepted / drafts

A draft is one round of one request. Imports no vLLM.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Acceptance:
    """Counts over some time.

    Attributes:
        num_drafts: how often tokens were drafted for a request.
        accepted_per_position: in how many of these drafts each position was accepted, [K].

    Raises:
        ValueError: the counts contradict each other.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted: int
    accepted_per_position: tuple[int, ...]

    def __post_init__(self) -> None:
        if sum(self.accepted_per_position) != self.num_accepted:
            raise ValueError(f"{self.num_accepted} accepted tokens, but {self.accepted_per_position} by position")

    @property
    def length(self) -> float:
        """Tokens for each step of the target, the bonus token included; 1 where nothing was drafted."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of drafts in which each position was accepted, 0..1, [K]."""
        return tuple(count / self.num_drafts if self.num_drafts else 0.0 for count in self.accepted_per_position)

    def since(self, before: Self) -> "Acceptance":
        """What was added to the counts ``before``."""
        old = before.accepted_per_position or (0,) * len(self.accepted_per_position)
        return Acceptance(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted - before.num_accepted,
            tuple(b - a for a, b in zip(old, self.accepted_per_position, strict=True)),
        )


def sum_of(groups: list[Acceptance]) -> Acceptance:
    """The counts of several groups together."""
    positions = zip(*(group.accepted_per_position for group in groups), strict=True)
    return Acceptance(
        sum(group.num_drafts for group in groups),
        sum(group.num_draft_tokens for group in groups),
        sum(group.num_accepted for group in groups),
        tuple(map(sum, positions)),
    )


def read_engine(llm: Any) -> Acceptance:
    """Counts since this engine started; zero where it does not speculate.

    Args:
        llm: a ``vllm.LLM`` with ``disable_log_stats=False``.
    """
    counts: dict[str, list[int]] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix(PREFIX)
        if name != metric.name:
            counts[name] = list(metric.values) if hasattr(metric, "values") else [metric.value]
    drafts, tokens, accepted = (counts.get(name, [0])[0] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return Acceptance(drafts, tokens, accepted, tuple(counts.get("accepted_tokens_per_pos", ())))


def read_metrics(metrics: str) -> Acceptance | None:
    """Counts since a server started, over all its engines, from the text of ``/metrics``; None without speculation."""
    from prometheus_client.parser import text_string_to_metric_families  # comes with vLLM

    counts: Counter[tuple[str, str | None]] = Counter()
    for family in text_string_to_metric_families(metrics):
        for name, labels, value, *_ in family.samples:
            if name.startswith(PREFIX) and name.endswith("_total"):
                counts[name.removeprefix(PREFIX).removesuffix("_total"), labels.get("position")] += int(value)
    num_k = sum(position is not None for _, position in counts)
    accepted = tuple(counts["accepted_tokens_per_pos", str(i)] for i in range(num_k))
    return Acceptance(counts["drafts", None], counts["draft_tokens", None], sum(accepted), accepted) if num_k else None


def from_bench_serve(raw: dict[str, Any]) -> Acceptance | None:
    """Counts of one run of ``vllm bench serve``, from what it wrote; None where nothing was drafted.

    It writes the share of drafts accepted at each position; times the number of drafts, that is a whole number.
    """
    if "spec_decode_num_drafts" not in raw:
        return None
    drafts = int(raw["spec_decode_num_drafts"])
    shares = raw.get("spec_decode_per_position_acceptance_rates", [])
    return Acceptance(
        num_drafts=drafts,
        num_draft_tokens=int(raw["spec_decode_draft_tokens"]),
        num_accepted=int(raw["spec_decode_accepted_tokens"]),
        accepted_per_position=tuple(round(share * drafts) for share in shares),
    )
