"""What is built, from what, for how long: the one table of the recipe."""

from dataclasses import dataclass
from typing import Any

SEED = 0
PROMPTS, MAX_TOKENS = 48, 96  # held-out prompts that acceptance is measured on, and the longest answer


@dataclass(frozen=True)
class Stage:
    """``does`` names the kind of work, ``options`` are its settings, ``needs`` the stages it reads from."""

    does: str
    options: dict[str, Any]
    needs: tuple[str, ...] = ()


def _target(kind: str, steps: int) -> Stage:
    return Stage("target", {"kind": kind, "steps": steps}, ("tokenizer",))


def _answers(target: str, port: int) -> Stage:
    return Stage("answers", {"target": target, "prompts": 4000, "port": port}, (target,))


def _head(target: str, steps: int, *needs: str, **how: Any) -> Stage:
    return Stage("head", {"target": target, "steps": steps, **how}, (f"{target}-answers", *needs))


def _sharp(target: str) -> Stage:
    return Stage("sharpen", {"target": target}, (f"{target}-peagle",))


EAGLE3 = {"by": "speculators", "kind": "eagle3"}
# Of two stages that can begin, the first in this order does: the longest way to the end comes first.
STAGES = {
    "tokenizer": Stage("tokenizer", {}),
    "tiny-llama": _target("llama", steps=1000),
    "tiny-qwen3": _target("qwen3", steps=700),
    "tiny-llama-answers": _answers("tiny-llama", port=8377),
    "tiny-qwen3-answers": _answers("tiny-qwen3", port=8378),
    # EAGLE-3 sees as many tokens as P-EAGLE; RESULTS.json counts the operations. The learning rates are the best after
    # 200 steps: of 0.01, 0.02 and 0.04 with one layer, 0.02 and 0.04 with four.
    "tiny-llama-eagle3": _head("tiny-llama", 800, layers=1, muon_lr=0.04, **EAGLE3),
    "tiny-llama-peagle": _head("tiny-llama", 800),
    "tiny-qwen3-peagle": _head("tiny-qwen3", 800),
    "tiny-llama-peagle-d2t": _head("tiny-llama", 40, "tiny-llama-peagle", draft_vocab=256, init="tiny-llama-peagle"),
    "tiny-llama-peagle-sharp": _sharp("tiny-llama"),
    "tiny-qwen3-peagle-sharp": _sharp("tiny-qwen3"),
    "tiny-llama-eagle3-4l": _head("tiny-llama", 800, layers=4, depths=3, muon_lr=0.02, **EAGLE3),
}
ASKED_FOR = ("tiny-llama-eagle3-4l",)  # stages that are built where --only names them
