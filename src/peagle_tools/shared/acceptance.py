"""What was drafted and what of it was accepted, from vLLM's counters: the one meter of every tool here.

    acceptance length = 1 + accepted draft tokens / drafts        the 1 is the bonus token
    share at position i = drafts whose first i tokens were accepted / drafts

A draft is one round of one request. Imports no vLLM.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from peagle_tools.shared.errors import ToolError

PREFIX = "vllm:spec_decode_num_"
BY_REQUEST = ("--per-request-spec-decode-metrics", "detailed")  # of vLLM's server: counts of each step of an answer
FIRST_CONTEXT, FIRST_OUTPUT = 256, 32  # tokens of the first group; each further one ends at twice those before


@dataclass(frozen=True)
class Acceptance:
    """Counts over some time."""

    num_drafts: int  # how often tokens were drafted for a request
    accepted_per_position: tuple[int, ...]  # in how many of these drafts each position was accepted, [K]

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def length(self) -> float:
        """Tokens for each step of the target, the bonus token included; 1 where nothing was drafted."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of drafts in which each position was accepted, 0..1, [K]."""
        return tuple(count / self.num_drafts if self.num_drafts else 0.0 for count in self.accepted_per_position)

    @property
    def error(self) -> float:
        """The standard error of ``length``, as if drafts were independent; 0 where nothing was drafted."""
        squares = sum((2 * i + 1) * share for i, share in enumerate(self.shares))  # the mean of accepted tokens squared
        return math.sqrt(max(squares - (self.length - 1) ** 2, 0) / max(self.num_drafts, 1))

    def since(self, before: Self) -> "Acceptance":
        """What was added to the counts ``before``."""
        old = before.accepted_per_position or (0,) * len(self.accepted_per_position)
        added = tuple(b - a for a, b in zip(old, self.accepted_per_position, strict=True))
        return Acceptance(self.num_drafts - before.num_drafts, added)


@dataclass(frozen=True)
class Places:
    """Acceptance by how many tokens there were at the draft, in groups of which each key is the last number."""

    context: dict[int, Acceptance] = field(default_factory=dict)  # by tokens of prompt and output
    output: dict[int, Acceptance] = field(default_factory=dict)  # by tokens of output


def places_of(answers: Iterable[tuple[int, Mapping[str, Any] | None]]) -> Places:
    """Where in context and output the drafts of some answers were accepted.

    vLLM lists steps that verified drafts. After a step without any, positions are too low by its one token.

    Args:
        answers: for each the tokens of its prompt and vLLM's ``metrics.speculative_decoding``.

    Raises:
        ToolError: an answer has no counts of its steps.
    """
    context, output = [], []
    for prompt_tokens, metrics in answers:
        if metrics is None or (metrics["num_spec_steps"] and not metrics.get("per_step_accepted")):
            raise ToolError(f"no counts of the steps of an answer; vLLM gives them with {' '.join(BY_REQUEST)}")
        tokens = 1  # by the prompt's own step
        for accepted in metrics.get("per_step_accepted") or ():
            step = Acceptance(1, tuple(int(i < accepted) for i in range(metrics["num_spec_tokens"])))
            context.append({_last_of_group(prompt_tokens + tokens, FIRST_CONTEXT): step})
            output.append({_last_of_group(tokens, FIRST_OUTPUT): step})
            tokens += accepted + 1
    return Places(merged(context), merged(output))


def merged(counts: Iterable[Mapping[int, Acceptance]]) -> dict[int, Acceptance]:
    """The sums of groups that have the same key, in the order of the keys."""
    groups: defaultdict[int, list[Acceptance]] = defaultdict(list)
    for part in counts:
        for last, seen in part.items():
            groups[last].append(seen)
    return {last: sum_of(groups[last]) for last in sorted(groups)}


def _last_of_group(tokens: int, first: int) -> int:
    return (first << (tokens // first).bit_length()) - 1


def sum_of(groups: list[Acceptance]) -> Acceptance:
    """The counts of several groups together."""
    positions = zip(*(group.accepted_per_position for group in groups), strict=True)
    return Acceptance(sum(group.num_drafts for group in groups), tuple(map(sum, positions)))


def read_engine(llm: Any) -> Acceptance:
    """Counts since this engine started; zero where it does not speculate.

    Args:
        llm: a ``vllm.LLM`` with ``disable_log_stats=False``.
    """
    counts = {metric.name.removeprefix(PREFIX): metric for metric in llm.get_metrics()}
    accepted = counts.get("accepted_tokens_per_pos")  # none before the first draft
    return Acceptance(counts["drafts"].value, tuple(accepted.values)) if accepted else Acceptance(0, ())


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
    return Acceptance(counts["drafts", None], accepted) if num_k else None


def from_bench_serve(raw: dict[str, Any]) -> Acceptance | None:
    """Counts of one run of ``vllm bench serve``, from what it wrote; None where nothing was drafted.

    It writes the share of drafts accepted at each position; times the number of drafts, that is a whole number.
    """
    if "spec_decode_num_drafts" not in raw:
        return None
    drafts = int(raw["spec_decode_num_drafts"])
    shares = raw["spec_decode_per_position_acceptance_rates"]
    return Acceptance(drafts, tuple(round(share * drafts) for share in shares))
