"""Rung 3: ``peagle-vllm train`` on the real target, from prompts to a checked head, what that drafts, and EAGLE-3."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import arms, train_gpu
from benchmarks.arms import HAS_GPU, SLOWER, call
from benchmarks.page import REHEARSAL, Goal, Table, having, measured, ratio
from benchmarks.parts import Part
from benchmarks.real import SETS, committed

ENGINE_LIMIT = 90 * SLOWER  # seconds
OURS, LOOKUP = (f"{name} K={train_gpu.K}" for name in ("P-EAGLE", "P-EAGLE with look-up"))
TODAY, EAGLE3 = "P-EAGLE K=7", "EAGLE-3 K=7"  # of the committed heads

NOTES = (
    "SmolLM2-135M-Instruct, bfloat16: it writes prompts and answers, 512 in flight; a head of four layers with its "
    "selector is trained for as many steps as the time holds. Tokens are those of answers. AL, held out: greedy, by "
    "replay; on the sets in vLLM, compared with the committed heads' on a CPU."
    if HAS_GPU
    else REHEARSAL
)


def parts() -> list[list[Part]]:
    """The head, and its acceptance without and with look-up; then EAGLE-3, for which another lease has time."""
    env = {} if HAS_GPU else arms.V1

    def training(head: str, function: Callable[..., Any]) -> Part:
        return Part(f"train {head}", call(function, place="OUT.train"), train_gpu.SECONDS, env)

    def acceptance(drafter: str, lookup: int = 0) -> Part:
        command = call(train_gpu.acceptance, place="OUT.al", drafter=drafter, lookup=lookup)
        return Part(f"acceptance {drafter} K={train_gpu.K}", command, ENGINE_LIMIT, env)

    # A rehearsal's check of the P-EAGLE head has let vLLM draft with it.
    ours = [acceptance("P-EAGLE"), acceptance("P-EAGLE with look-up", 2)] if HAS_GPU else []
    first, other = training("P-EAGLE", train_gpu.train), training("EAGLE-3", train_gpu.train_eagle3)
    return [[first], ours, [other], [acceptance("EAGLE-3")]]


def tables(cells: list[dict[str, Any]]) -> Iterator[Table]:
    yield "steps", having(cells, "step")
    yield "acceptance length of held-out answers", having(cells, "AL, held out")
    yield "acceptance length in vLLM, and its 95% interval", having(cells, "al")


def goals(cells: list[dict[str, Any]]) -> Iterator[Goal]:
    """20 million tokens of answers seen; longer drafts than the committed heads'."""
    yield Goal("tokens of answers that the head has seen", ">=", 20e6, measured(cells, "tokens", step="run"))
    for mine, other, least in ((OURS, EAGLE3, 1), (LOOKUP, EAGLE3, 1.5), (OURS, TODAY, 1.25)):
        for name in SETS:
            value = ratio(measured(cells, "al", arm=mine, set=name), committed()[other][name]["al"])
            yield Goal(f"acceptance length of {mine} over that of the committed {other} on {name}", ">=", least, value)
