"""The usual shape of a curve of acceptance over draft positions, and what looks wrong in one."""

from peagle_vllm.acceptance import Acceptance

# Each position is accepted in this share of the drafts in which the one before it was. Equal shares of 0.73 to 0.82
# make the published acceptance lengths (gpt-oss-20b: 2.87 to 3.02 at K=3, 3.38 to 3.94 at K=7); the tiny heads of
# models/ lie at 0.67 to 0.81.
USUAL = (0.62, 0.86)
LOW = 0.55  # below this it looks wrong
FEW = 30  # drafts; fewer tell nothing


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
