"""What is built, from what, for how long: the one table of the recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 0


@dataclass(frozen=True)
class Stage:
    """``does`` names the kind of work, ``options`` are its settings, ``needs`` the stages it reads from."""

    does: str
    options: dict[str, Any]
    needs: tuple[str, ...] = ()


def _target(kind: str, steps: int) -> Stage:
    return Stage("target", {"kind": kind, "steps": steps}, ("tokenizer",))


def _selfgen(kind: str, prompts: int) -> Stage:
    return Stage("selfgen", {"target": f"tiny-{kind}", "prompts": prompts}, (f"tiny-{kind}",))


def _head(target: str, kind: str, **options: Any) -> Stage:
    selfgen, first = f"selfgen-{target.removeprefix('tiny-')}", options.get("begin_with")
    return Stage("head", {"target": target, "kind": kind, **options}, (selfgen, first) if first else (selfgen,))


STAGES = {
    "tokenizer": Stage("tokenizer", {}),
    "tiny-llama": _target("llama", steps=1000),
    "tiny-qwen3": _target("qwen3", steps=700),
    "selfgen-llama": _selfgen("llama", prompts=6000),
    "selfgen-qwen3": _selfgen("qwen3", prompts=5000),
    "tiny-llama-peagle": _head("tiny-llama", "peagle", layers=4, depth=8, steps=1400),
    "tiny-qwen3-peagle": _head("tiny-qwen3", "peagle", layers=4, depth=8, steps=500),
    # As many exchanges as the P-EAGLE head has seen; 5% fewer and 8% more operations (RESULTS.json counts them). The
    # learning rates are the best after 200 steps: of 0.01, 0.02 and 0.04 with one layer, 0.02 and 0.04 with four.
    "tiny-llama-eagle3": _head("tiny-llama", "eagle3", layers=1, depth=8, steps=1400, muon_lr=0.04),
    "tiny-llama-eagle3-4l": _head("tiny-llama", "eagle3", layers=4, depth=3, steps=1400, muon_lr=0.02),
    "tiny-llama-peagle-d2t": _head(
        "tiny-llama", "peagle", layers=4, depth=8, steps=40, draft_vocab=256, begin_with="tiny-llama-peagle"
    ),
}


def run_stage(name: str, work: Path) -> dict:
    """Run one stage in this process; its output goes to ``work / name``, its figures are returned."""
    stage, place = STAGES[name], work / name
    if stage.does == "tokenizer":
        from tokens import train_tokenizer

        train_tokenizer(work / "tokenizer-files", SEED)
        return {"seed": SEED}
    import torch

    torch.set_num_threads(1)
    if stage.does == "target":
        from target import train_target

        return train_target(stage.options["kind"], work / "tokenizer-files", place, stage.options["steps"], SEED)
    if stage.does == "selfgen":
        from selfgen import generate

        return generate(work / stage.options["target"], work / f"{name}.pt", stage.options["prompts"], SEED)
    from heads import HeadPlan, train_head

    plan = HeadPlan(name=name, **stage.options)
    return train_head(plan, work / plan.target, work / f"{stage.needs[0]}.pt", place, SEED)
