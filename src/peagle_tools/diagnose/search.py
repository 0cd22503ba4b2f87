"""Which acceptance per position is usual, and which single changes help, beyond noise."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import NamedTuple

from peagle_tools.diagnose.interventions import Intervention, Setup
from peagle_tools.shared.acceptance import Acceptance, Places

# Each position is accepted in this share of the drafts in which the one before it was. Equal shares of 0.73 to 0.82
# make the published acceptance lengths (gpt-oss-20b: 2.87 to 3.02 at K=3, 3.38 to 3.94 at K=7); the tiny heads of
# models/ lie at 0.67 to 0.81.
USUAL = (0.62, 0.86)
LOW = 0.55  # below this it looks wrong
FEW = 30  # drafts; fewer are not judged
LEAST_GAIN = 0.05  # of the acceptance length
LEAST_ERRORS = 3.5  # standard errors of the mean difference between answers to the same prompt
MOST_CAUSES = 3
MEANING = {  # of the first position that looks wrong
    1: "position 1 is rarely accepted: look at the prompts' chat template, the aux layers and the head's own config",
    2: "position 1 is fine, the rest decays: look at the mask inputs (mask_hidden and the mask token)",
    3: "the last positions decay: K is more than the head was trained for, or the head is poor there",
}


class Measured(NamedTuple):
    """Acceptance over all prompts, tokens a round of the answer to each of them, and acceptance by place."""

    curve: Acceptance
    lengths: tuple[float, ...]
    places: Places = Places()


@dataclass(frozen=True)
class Trial:
    """An intervention, with the acceptance of the setup before and after it."""

    intervention: Intervention
    before: Acceptance
    after: Acceptance
    standard_errors: float  # the mean difference between answers to the same prompt / its standard error

    @property
    def gain(self) -> float:
        """Relative change of the acceptance length."""
        return self.after.length / self.before.length - 1

    @property
    def helps(self) -> bool:
        """Whether the gain is beyond noise."""
        return self.gain >= LEAST_GAIN and self.standard_errors >= LEAST_ERRORS


@dataclass
class Diagnosis:
    """The outcome of ``diagnose``, or as much of it as there is."""

    curve: Acceptance  # of the setup as it was given
    unusual: list[str]  # what looks wrong in that curve and by context
    places: Places = field(default_factory=Places)  # of the setup as it was given
    trials: list[Trial] = field(default_factory=list)  # every intervention tried, in order
    causes: list[Trial] = field(default_factory=list)  # those that helped, each tried on top of the ones before
    complete: bool = False


def usual_rates(position: int) -> tuple[float, float]:
    """The usual share of drafts in which a position, counted from 1, is accepted: (low, high)."""
    return USUAL[0] ** position, USUAL[1] ** position


def irregularities(curve: Acceptance) -> list[str]:
    """What looks wrong, a line each; empty for a usual curve, and for one of too few drafts."""
    lines: list[str] = []
    before, low = curve.num_drafts, []
    for position, count in enumerate(curve.accepted_per_position, start=1):
        if before < FEW:
            break
        share = count / before
        if share < LOW:
            after = f" of those whose position {position - 1} was" if position > 1 else ""
            lines.append(f"position {position} is accepted in {share:.0%} of the drafts{after}, usually 62% to 86%")
            low.append(position)
        before = count
    return lines + ([MEANING[min(low[0], 3)]] if low else [])


def falling(context: Mapping[int, Acceptance]) -> list[str]:
    """Where acceptance falls with context beyond noise, a line; windows are worth a try then."""
    judged = [(last, seen) for last, seen in sorted(context.items()) if seen.num_drafts >= FEW]
    if not judged:
        return []
    (first, short), (last, long) = judged[0], judged[-1]
    error = math.hypot(short.error, long.error)
    if long.length >= (1 - LEAST_GAIN) * short.length or short.length - long.length < LEAST_ERRORS * error:
        return []
    lengths = f"{short.length:.2f} up to {first} tokens of context, {long.length:.2f} from {(last + 1) // 2} on"
    return [f"acceptance length {lengths}: a window may help (peagle-vllm convert HEAD OUT --window W)"]


def standard_errors(before: Measured, after: Measured) -> float:
    """How many standard errors the answers are longer a round, prompt by prompt; 0 with fewer than three prompts."""
    differences = [b - a for a, b in zip(before.lengths, after.lengths, strict=True)]
    if len(differences) < 3:
        return 0.0
    return mean(differences) / max(stdev(differences) / math.sqrt(len(differences)), 1e-9)


def diagnose(
    setup: Setup,
    measure: Callable[[Setup], Measured],
    propose: Callable[[Setup], Iterable[Intervention]],
) -> Iterator[tuple[Diagnosis, int]]:
    """Measure a setup, try each change, keep the best; where the curve stays unusual, try the others on top of it.

    Yields after each measurement the diagnosis so far, one object that grows, and how many changes are left at least.
    """
    base = measure(setup)
    diagnosis = Diagnosis(base.curve, irregularities(base.curve) + falling(base.places.context), base.places)
    while len(diagnosis.causes) < MOST_CAUSES:
        done = {cause.intervention.kind for cause in diagnosis.causes}
        changes = [change for change in propose(setup) if change.kind not in done]
        yield diagnosis, len(changes)
        best = best_trial = None
        for left, change in enumerate(changes, start=1 - len(changes)):
            after = measure(change.setup)
            trial = Trial(change, base.curve, after.curve, standard_errors(base, after))
            diagnosis.trials.append(trial)
            if trial.helps and (best_trial is None or trial.gain > best_trial.gain):
                best, best_trial = after, trial
            yield diagnosis, -left
        if best is None or best_trial is None:
            break
        diagnosis.causes.append(best_trial)
        setup, base = best_trial.intervention.setup, best
        if not irregularities(base.curve):
            break
    diagnosis.complete = True
