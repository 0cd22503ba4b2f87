"""What was drafted and what of it was accepted, from vLLM's counters: the one meter of every tool here.

    acceptance length = 1 + accepted draft tokens / drafts        the 1 is the bonus token
    share at position i = drafts whose first i tokens were accepted / drafts

A draft is one round of one request. Imports no vLLM.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Self

PREFIX = "vllm:spec_decode_num_"
BY_REQUEST = ("--per-request-spec-decode-metrics", "detailed")  # of vLLM's server: counts of each step of an answer


@dataclass(frozen=True)
class Acceptance:
    """Counts over some time."""

    num_drafts: int  # how often tokens were drafted for a request
    accepted_per_position: tuple[int, ...]  # in how many of these drafts each position was accepted, [K]

    @property
    def length(self) -> float:
        """Tokens for each step of the target, the bonus token included; 1 where nothing was drafted."""
        return 1 + sum(self.accepted_per_position) / max(self.num_drafts, 1)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of drafts in which each position was accepted, 0..1, [K]."""
        return tuple(count / self.num_drafts if self.num_drafts else 0.0 for count in self.accepted_per_position)

    def since(self, before: Self) -> "Acceptance":
        """What was added to the counts ``before``."""
        old = before.accepted_per_position or (0,) * len(self.accepted_per_position)
        added = tuple(b - a for a, b in zip(old, self.accepted_per_position, strict=True))
        return Acceptance(self.num_drafts - before.num_drafts, added)


class Answer(NamedTuple):
    """Token ids of a prompt and its answer, and vLLM's ``metrics.speculative_decoding``."""

    prompt: Sequence[int]
    output: Sequence[int]
    metrics: Mapping[str, Any]  # as ``BY_REQUEST`` asks for them


def by_repeated(answers: Iterable[Answer]) -> dict[int, Acceptance]:
    """Acceptance by how many last tokens had occurred before a draft: from ``prompt_lookup_min`` on look-up drafts, and
    the head below it.

    vLLM lists steps that verified drafts. After a step without any, positions are too low by its one token; such an
    answer is left out.
    """
    counts = []
    for prompt, answer, metrics in answers:
        steps = metrics.get("per_step_accepted") or ()  # after the prompt's own, which gives one token
        *known, end = accumulate((accepted + 1 for accepted in steps), initial=len(prompt) + 1)
        if steps and end >= len(prompt) + len(answer):
            matches = zip(repeated_tokens([*prompt, *answer], known), steps, strict=True)
            counts += [{n: acceptance_of([accepted], metrics["num_spec_tokens"])} for n, accepted in matches]
    return merged(counts)


def repeated_tokens(tokens: Sequence[int], known: Sequence[int]) -> list[int]:
    """For each number of ``known`` tokens, how many of the last ones had occurred before, as look-up counts them."""
    import torch

    from peagle_kernels.lookup_drafts import longest_match

    ids = torch.tensor(tokens)
    rows = torch.tensor(known).split(64)  # a row takes some 32 bytes for each token
    return [n for last in rows for n in longest_match(ids.expand(len(last), -1), last - 1)[0].tolist()]


def merged(counts: Iterable[Mapping[int, Acceptance]]) -> dict[int, Acceptance]:
    """The sums of groups that have the same key, in the order of the keys."""
    groups: defaultdict[int, list[Acceptance]] = defaultdict(list)
    for part in counts:
        for last, seen in part.items():
            groups[last].append(seen)
    return {last: sum_of(groups[last]) for last in sorted(groups)}


def acceptance_of(accepted: Sequence[int], num_k: int) -> Acceptance:
    """Of rounds in which so many of ``num_k`` drafts were accepted."""
    return Acceptance(len(accepted), tuple(sum(number > i for number in accepted) for i in range(num_k)))


def sum_of(groups: list[Acceptance]) -> Acceptance:
    """The counts of several groups together."""
    positions = zip(*(group.accepted_per_position for group in groups), strict=True)
    return Acceptance(sum(group.num_drafts for group in groups), tuple(map(sum, positions)))


def read_engine(llm: Any) -> Acceptance:
    """Counts since this ``vllm.LLM``, with ``disable_log_stats=False``, started; zero where it does not speculate."""
    counts = {metric.name.removeprefix(PREFIX): metric for metric in llm.get_metrics()}
    accepted = counts.get("accepted_tokens_per_pos")  # none before the first draft
    return Acceptance(counts["drafts"].value, tuple(accepted.values)) if accepted else Acceptance(0, ())
