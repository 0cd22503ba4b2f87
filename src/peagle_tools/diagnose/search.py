"""Which acceptance per position is usual, and which single changes help, beyond noise."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import NamedTuple

from peagle_tools.diagnose.interventions import Intervention, Setup
from peagle_tools.shared.acceptance import Acceptance

# Each position is accepted in this share of the drafts in which the one before it was. Equal shares of 0.73 to 0.82
# make the published acceptance lengths (gpt-oss-20b: 2.87 to 3.02 at K=3, 3.38 to 3.94 at K=7); the tiny heads of
# models/ lie at 0.67 to 0.81.
USUAL = (0.62, 0.86)
LOW = 0.55  # below this it looks wrong
FEW = 30  # drafts; fewer are not judged
LEAST_GAIN = 0.05  # of the acceptance length
LEAST_ERRORS = 3.5  # standard errors of the mean difference between answers to the same prompt
MEANING = {  # of the first position that looks wrong
    1: "position 1 is rarely accepted: look at the prompts' chat template, the aux layers and the head's own config",
    2: "position 1 is fine, the rest decays: look at the mask inputs (mask_hidden and the mask token)",
    3: "the last positions decay: K is more than the head was trained for, or the head is poor there",
}


class Measured(NamedTuple):
    """Acceptance over all prompts, and what it is made of."""

    curve: Acceptance
    lengths: tuple[float, ...]  # tokens a round of each answer
    repeated: Mapping[int, Acceptance]  # by how many last tokens had occurred before


@dataclass(frozen=True)
class Trial:
    """An intervention, with what was measured before and after it."""

    intervention: Intervention
    before: Measured
    after: Measured

    @property
    def lengths(self) -> tuple[float, float]:
        """The acceptance length before and after."""
        return self.before.curve.length, self.after.curve.length

    @property
    def gain(self) -> float:
        """Relative change of the acceptance length."""
        before, after = self.lengths
        return after / before - 1

    @property
    def standard_errors(self) -> float:
        """How many standard errors the answers are longer a round, prompt by prompt; there are three or more."""
        differences = [b - a for a, b in zip(self.before.lengths, self.after.lengths, strict=True)]
        return mean(differences) / max(stdev(differences) / math.sqrt(len(differences)), 1e-9)

    @property
    def helps(self) -> bool:
        """Whether the gain is beyond noise."""
        return self.gain >= LEAST_GAIN and self.standard_errors >= LEAST_ERRORS


@dataclass(frozen=True)
class Diagnosis:
    base: Measured  # the setup as it was given
    trials: list[Trial]  # every intervention, in order
    cause: Trial | None  # the one that helped most


def irregularities(curve: Acceptance) -> list[str]:
    """The first position that looks wrong and what it means, a line each; empty for a usual curve or too few drafts."""
    before = curve.num_drafts
    for position, count in enumerate(curve.accepted_per_position, start=1):
        if before < FEW:
            break
        if (share := count / before) < LOW:
            after = f" of those whose position {position - 1} was" if position > 1 else ""
            line = f"position {position} is accepted in {share:.0%} of the drafts{after}, usually 62% to 86%"
            return [line, MEANING[min(position, 3)]]
        before = count
    return []


def diagnose(measure: Callable[[Setup], Measured], setup: Setup, changes: Sequence[Intervention]) -> Diagnosis:
    """Measure a setup and each change to it; a line on stderr tells of each measurement."""
    base = measure(setup)
    print(f"acceptance length {base.curve.length:.2f}", file=sys.stderr)
    trials: list[Trial] = []
    for left, change in zip(reversed(range(len(changes))), changes, strict=True):
        trials.append(Trial(change, base, measure(change.setup)))
        before, after = trials[-1].lengths
        print(f"{change.change}: {before:.2f} -> {after:.2f}; {left} changes left", file=sys.stderr)
    best = max((trial for trial in trials if trial.helps), key=lambda trial: trial.gain, default=None)
    return Diagnosis(base, trials, best)
