"""Where a round of one request goes on the real target, part by part: V1 on a CPU, and vLLM's advice for a server.

``make real-target`` first, on an otherwise idle machine. A round is a step of the engine: the target's forward, and the
drafts. ``--preload`` names what vLLM advises to preload (tcmalloc and Intel's OpenMP), for arms of their own.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from benchmarks import arms
from benchmarks.engines import inside
from benchmarks.real import NONE, PLAIN, THREADS, TIMED_PROMPTS, TIMED_TOKENS, Engine, RealArm, live
from peagle_tools.shared.provenance import provenance

REPEATS = 3


@dataclass(frozen=True)
class Advised(RealArm):
    """An arm with more environment variables."""

    more: tuple[tuple[str, str], ...] = ()

    @property
    def env(self) -> dict[str, str]:
        return super().env | dict(self.more)


DRAFTER = {"head": "peagle", "k": 3, "selector": True}
ARMS: list[RealArm] = [
    NONE,
    RealArm(PLAIN, "peagle-plain", 3),
    *(RealArm("P-EAGLE", "peagle", k, selector=True) for k in (3, 7)),
    RealArm("EAGLE-3", "eagle3", 3),
]


def advised(how: str, **more: str) -> list[RealArm]:
    variables = tuple(more.items())
    return [Advised(f"none, {how}", more=variables), Advised(f"P-EAGLE, {how}", **DRAFTER, more=variables)]


def rounds(engine: Engine, prompt: int) -> list[dict[str, float]]:
    """Milliseconds of each part of each round of an answer."""
    runner, drafter = inside(engine.llm)
    core, found = engine.llm.llm_engine, list[dict[str, float]]()

    def clock(owner: Any, name: str, part: str) -> None:
        method = getattr(owner, name)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            if part == "round":
                found.append({})
            began = time.perf_counter()
            result = method(*args, **kwargs)
            found[-1][part] = found[-1].get(part, 0) + 1e3 * (time.perf_counter() - began)
            return result

        setattr(owner, name, clocked)
        undo.callback(delattr, owner, name)

    with ExitStack() as undo:
        clock(core, "step", "round")
        clock(runner.model, "forward", "target's forward")
        if drafter:
            clock(drafter, "propose", "drafts")
            clock(drafter, "set_inputs_first_pass", "drafts: preparation")
            clock(drafter.model, "forward", "drafts: head's forward")
            clock(drafter, "_sample_draft_tokens", "drafts: logits and choice")
        engine.timed("humaneval", slice(prompt, prompt + 1))
    return [one for one in found if "target's forward" in one]


def middle(answer: list[dict[str, float]]) -> float:
    """The median round, in milliseconds."""
    return float(np.median([one["round"] for one in answer]))


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--preload", help="libraries, separated by colons")
    args = parser.parse_args()
    measured = ARMS + advised("threads bound", VLLM_CPU_OMP_THREADS_BIND="auto")
    if args.preload:
        measured += advised("preloaded", LD_PRELOAD=args.preload)
    samples: dict[RealArm, list[list[dict[str, float]]]] = {arm: [] for arm in measured}
    with ExitStack() as stack:
        calls = {arm: stack.enter_context(live(arm)) for arm in measured}
        for call in calls.values():
            call("prompt", ["Hello"])  # returns when the engine has started
        for _, prompt, (arm, call) in product(range(REPEATS), range(TIMED_PROMPTS), calls.items()):
            samples[arm].append(call(rounds, prompt))
    rows: list[dict[str, Any]] = []
    for arm, answers in samples.items():
        found = [one for answer in answers for one in answer]
        ms = {part: round(float(np.median([one.get(part, 0) for one in found])), 2) for part in found[-1]}
        ms["rest"] = round(ms["round"] - ms["target's forward"] - ms.get("drafts", 0), 2)
        ratios = [middle(mine) / middle(plain) for mine, plain in zip(answers, samples[NONE], strict=True)]
        drafter = {"name": arm.name, "head": arm.head, "k": arm.k}
        rows.append({"arm": drafter, "rounds": len(found), "ms": ms, "plain_steps": arms.summary(ratios)})
        print(arm.label, rows[-1]["plain_steps"]["median"], ms, flush=True)
    timed = {"repeats": REPEATS, "prompts": TIMED_PROMPTS, "tokens": TIMED_TOKENS, "threads": THREADS}
    arms.write_result(args.out, __doc__, {"timed": timed, "arms": rows} | provenance())


if __name__ == "__main__":
    main()
