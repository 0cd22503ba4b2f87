"""Which acceptance per position is usual, and which single changes to an odd one help, and by how much."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from peagle_vllm.acceptance import Acceptance
from peagle_vllm.diagnose.interventions import Intervention, Setup

# Each position is accepted in this share of the drafts in which the one before it was. Equal shares of 0.73 to 0.82
# make the published acceptance lengths (gpt-oss-20b: 2.87 to 3.02 at K=3, 3.38 to 3.94 at K=7); the tiny heads of
# models/ lie at 0.67 to 0.81.
USUAL = (0.62, 0.86)
LOW = 0.55  # below this it looks wrong
FEW = 30  # drafts; fewer are not judged
LEAST_GAIN = 0.15  # of the acceptance length; a smaller one may be chance
MOST_CAUSES = 3


@dataclass(frozen=True)
class Trial:
    """An intervention, with the acceptance of the setup before and after it."""

    intervention: Intervention
    before: Acceptance
    after: Acceptance

    @property
    def gain(self) -> float:
        """Relative change of the acceptance length."""
        return self.after.length / self.before.length - 1


@dataclass
class Diagnosis:
    """The outcome of ``diagnose``."""

    curve: Acceptance  # of the setup as it was given
    odd: list[str]  # what looks wrong in that curve
    trials: list[Trial] = field(default_factory=list)  # every intervention tried, in order
    causes: list[Trial] = field(default_factory=list)  # those that helped, each tried on top of the ones before


def usual_rates(position: int) -> tuple[float, float]:
    """The usual share of drafts in which a position, counted from 1, is accepted: (low, high)."""
    return USUAL[0] ** position, USUAL[1] ** position


def oddities(curve: Acceptance) -> list[str]:
    """What looks wrong, a line each; empty for a usual curve, and for one of too few drafts."""
    found, before = [], curve.num_drafts
    for position, count in enumerate(curve.accepted_per_position, start=1):
        if before < FEW:
            break
        share = count / before
        if share < LOW:
            after = f" of those whose position {position - 1} was" if position > 1 else ""
            found.append(f"position {position} is accepted in {share:.0%} of the drafts{after}, usually 62% to 86%")
        before = count
    return found


def diagnose(
    setup: Setup,
    measure: Callable[[Setup], Acceptance],
    propose: Callable[[Setup], Iterable[Intervention]],
    always: bool = False,
) -> Diagnosis:
    """Measure a setup; where it looks wrong, or ``always``, try each change, keep the best, try the others on it."""
    curve = measure(setup)
    found = Diagnosis(curve, oddities(curve))
    done: set[str] = set()
    while (oddities(curve) or (always and not found.causes)) and len(found.causes) < MOST_CAUSES:
        trials = [Trial(i, curve, measure(i.setup)) for i in propose(setup) if i.kind not in done]
        found.trials += trials
        best = max(trials, key=lambda trial: trial.gain, default=None)
        if best is None or best.gain < LEAST_GAIN:
            break
        found.causes.append(best)
        done.add(best.intervention.kind)
        setup, curve = best.intervention.setup, best.after
    return found
