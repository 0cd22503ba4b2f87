"""Which single changes help, and by how much."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from peagle_vllm.acceptance import Acceptance
from peagle_vllm.diagnose.curve import oddities
from peagle_vllm.diagnose.interventions import Intervention, Setup

LEAST_GAIN = 0.15  # of the acceptance length; a smaller one may be chance
MOST_CAUSES = 3

Measure = Callable[[Setup], Acceptance]
Propose = Callable[[Setup], Iterable[Intervention]]


@dataclass(frozen=True)
class Trial:
    """An intervention, and what it did to the setup it was tried on."""

    intervention: Intervention
    before: Acceptance
    after: Acceptance

    @property
    def gain(self) -> float:
        """Relative change of the acceptance length."""
        return self.after.length / self.before.length - 1

    @property
    def names_a_cause(self) -> bool:
        return self.gain >= LEAST_GAIN


@dataclass
class Diagnosis:
    """What was found.

    Attributes:
        curve: of the setup as it was given.
        odd: what looks wrong in it.
        trials: every intervention tried, in order.
        causes: those that helped, each tried on top of the ones before.
    """

    curve: Acceptance
    odd: list[str]
    trials: list[Trial] = field(default_factory=list)
    causes: list[Trial] = field(default_factory=list)


def diagnose(setup: Setup, measure: Measure, propose: Propose, always: bool = False) -> Diagnosis:
    """Measure a setup; where it looks wrong, or ``always``, try each change, keep the best, try the others on it."""
    curve = measure(setup)
    found = Diagnosis(curve, oddities(curve))
    done: set[str] = set()
    while (oddities(curve) or (always and not found.causes)) and len(found.causes) < MOST_CAUSES:
        trials = [Trial(i, curve, measure(i.setup)) for i in propose(setup) if i.kind not in done]
        found.trials += trials
        best = max(trials, key=lambda trial: trial.gain, default=None)
        if best is None or not best.names_a_cause:
            break
        found.causes.append(best)
        done.add(best.intervention.kind)
        setup, curve = best.intervention.setup, best.after
    return found
