"""Rung 3: ``peagle-vllm train`` on the real target, from prompts to a checked head, what that drafts, and EAGLE-3."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import train_gpu
from benchmarks.arms import HAS_GPU, SLOWER, V1, call
from benchmarks.page import Goal, Table, having, measured, ratio
from benchmarks.parts import Part
from benchmarks.real import SETS, committed

ENGINE_LIMIT = 200 * SLOWER  # seconds
OURS = f"P-EAGLE K={train_gpu.K}"
LOOKUP = f"P-EAGLE with look-up K={train_gpu.K}"
EAGLE3 = f"EAGLE-3 K={train_gpu.K}"
TODAY = "P-EAGLE K=7"  # of the committed heads

NOTES = (
    "SmolLM2-135M-Instruct, bfloat16: it writes prompts and answers, 512 in flight, to which committed answers may be "
    "added; a head of four layers with its selector, and EAGLE-3's of one layer, are trained on them side by side, for "
    f"up to {train_gpu.STEPS_SECONDS} seconds or {train_gpu.MOST_TOKENS / 1e6:.0f} million tokens. Tokens are those of "
    "answers. AL, held out: greedy, by replay; on the sets in vLLM, compared with the committed heads' on a CPU."
)


def parts() -> list[list[Part]]:
    """Documents, both heads (the CPU bounds each, so the GPU has room for two), what both draft."""

    def step(name: str, function: Callable[..., Any], limit: float = 280) -> Part:
        env = {"OMP_NUM_THREADS": "4"} if HAS_GPU else V1  # two processes train at the same time
        return Part(name, call(function, place="OUT.place"), limit * SLOWER, env)

    def acceptance(drafter: str, lookup: int = 0) -> Part:
        arm = train_gpu.trained(Path("run"), drafter, lookup)
        command = call(train_gpu.acceptance, place="OUT.place", drafter=drafter, lookup=lookup)
        return Part(f"acceptance {arm.label}", command, ENGINE_LIMIT, arm.env | ({} if HAS_GPU else V1))

    # A rehearsal's check has let vLLM draft with the head.
    ours = [acceptance("P-EAGLE"), acceptance("P-EAGLE with look-up", 2)] if HAS_GPU else []
    return [
        [step("answers", train_gpu.answers)],
        [step("data", train_gpu.data)],
        [step("train P-EAGLE", train_gpu.train, 540), step("train EAGLE-3", train_gpu.train_eagle3, 540)],
        [*ours, acceptance("EAGLE-3")],
        [step("check", train_gpu.check, 200)],
    ]


def tables(cells: list[dict[str, Any]]) -> Iterator[Table]:
    yield "steps", having(cells, "step")
    yield "acceptance length of held-out answers", having(cells, "AL, held out")
    yield "acceptance length in vLLM, and its 95% interval", having(cells, "al")


def goals(cells: list[dict[str, Any]]) -> Iterator[Goal]:
    """20 million tokens of answers seen; longer drafts than the committed heads'."""
    for head, step in (("P-EAGLE", "run"), ("EAGLE-3", "EAGLE-3: run")):
        yield Goal(f"tokens of answers that {head} has seen", ">=", 20e6, measured(cells, "tokens", step=step))
    for name in SETS:
        al = {arm: measured(cells, "al", arm=arm, set=name) for arm in (OURS, LOOKUP, EAGLE3)}
        today = ratio(al[OURS], committed()[TODAY][name]["al"])
        yield Goal(f"acceptance length of {OURS} over that of the committed head on {name}", ">=", 1.25, today)
        for arm, least in ((OURS, 1), (LOOKUP, 1.5)):
            yield Goal(f"acceptance length of {arm} over EAGLE-3's on {name}", ">=", least, ratio(al[arm], al[EAGLE3]))
