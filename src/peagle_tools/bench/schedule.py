"""Which K to serve at which concurrency, from measured cells alone, as vLLM's config for it.

At each measured concurrency the smallest depth is taken that repeats do not tell from the fastest one; no speculation
is the smallest of all. Between two measured concurrencies the depth of the larger one holds.
"""

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from peagle_tools.bench.metrics import Point, Ratio, by_speed, number, without_speculation


class Choice(NamedTuple):
    """The depth for one measured concurrency."""

    k: int  # num_speculative_tokens; 0 is no speculation
    point: Point  # the measured cells of that depth; of the fastest depth that speculates where ``k`` is 0
    gain: Ratio  # output tokens/s of ``point`` over no speculation

    @property
    def text(self) -> str:
        rate = f"{number(self.point.tokens_per_second.median)} tokens/s, {self.gain.text()} x no speculation"
        fastest = "" if self.k else "no speculation; the fastest depth is "
        return f"c={self.point.concurrency}: {fastest}K={self.point.k}, {rate}"


def choices(arm: str, points: Sequence[Point]) -> list[Choice]:
    """One for each concurrency at which this arm and no speculation were measured; ``points`` are of one data set."""
    chosen = []
    for (_, concurrency), alone in sorted(without_speculation(points).items()):
        mine = sorted((p for p in points if (p.arm, p.concurrency) == (arm, concurrency)), key=lambda p: p.k)
        if mine:
            most = max(alone, *mine, key=by_speed).tokens_per_second
            k = next(p.k for p in [alone, *mine] if most.over(p.tokens_per_second).overlaps_one)
            point = next((p for p in mine if p.k == k), max(mine, key=by_speed))
            chosen.append(Choice(k, point, point.tokens_per_second.over(alone.tokens_per_second)))
    return chosen


def ranges(chosen: Sequence[Choice]) -> list[list[int]]:
    """vLLM's ``num_speculative_tokens_per_batch_size``: [first batch size, last, K], ends included."""
    schedule, first = [], 1
    for k, same in itertools.groupby(chosen, key=lambda choice: choice.k):
        last = list(same)[-1].point.concurrency
        schedule.append([first, last, k])
        first = last + 1
    return schedule


def advice(dataset: str, points: Sequence[Point], suite: Mapping[str, Any]) -> Iterator[str]:
    """Lines of each drafter: the best K at each concurrency, from where not to speculate, and last the config to paste.

    ``points`` are of one data set, ``suite`` is as sweep.json has it.
    """
    arms = {p.arm: choices(p.arm, points) for p in points if p.k}
    if not arms:
        yield f"{dataset}: no K, for no drafter was measured."
    for arm, chosen in arms.items():
        if not chosen:
            yield f"{dataset}: no K for {arm}, for no concurrency was measured both with it and without speculation."
        elif any(choice.gain.repeats < 2 for choice in chosen):
            yield f"{dataset}: no K for {arm}, for one repeat does not show the noise; `--repeats 3` adds two."
        else:
            yield f"{dataset}: {arm}."
            yield from (choice.text for choice in chosen)
            yield from _to_paste(chosen, suite["arms"][arm], suite["serve"])


def _to_paste(chosen: Sequence[Choice], arm: Any, serve: Any) -> Iterator[str]:
    """How to serve these choices; ``arm`` and ``serve`` are the suite's."""
    schedule = ranges(chosen)
    deepest = max(choice.k for choice in chosen)
    if deepest == 0:
        yield "No depth gains more than the noise: leave --speculative-config out."
        return
    first, last, k = schedule[-1]
    if k:
        yield f"Speculation gains up to c={last}, the largest measured with and without it; vLLM keeps K={k} beyond it."
    else:
        yield f"Above c={first - 1}, do not speculate."
    config = arm["speculative_config"] | {"num_speculative_tokens": deepest}
    if len(schedule) > 1:  # one K throughout needs no schedule, which on V1 would cost the full CUDA graphs
        config["num_speculative_tokens_per_batch_size"] = schedule
        yield f"Warning: under data parallelism vLLM drops this schedule and uses K={deepest} at every batch size."
    variables = [f"{name}={value}" for name, value in (serve["environment"] | arm["environment"]).items()]
    if setting := [*variables, *shlex.split(serve["flags"]), *shlex.split(arm["flags"])]:
        yield f"Measured with {shlex.join(setting)}."
    if config.get("model", "").startswith("."):
        yield "Below, the path of the head begins in the suite's folder."
    yield f"--speculative-config {shlex.quote(json.dumps(config))}"
