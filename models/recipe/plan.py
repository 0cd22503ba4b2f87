"""What is built, from what, for how long: the one table of the recipe."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from models.recipe.heads import answers, sharpen_head, train_head
from models.recipe.target import train_target
from models.recipe.tokens import train_tokenizer


@dataclass(frozen=True)
class Stage:
    """A call of ``function``, which is also given the folder of all stages and this one's name.

    Attributes:
        needs: the stages that it reads from.
    """

    function: Callable[..., dict[str, Any]]
    options: dict[str, Any]
    needs: tuple[str, ...] = ()


def _head(target: str, steps: int, *needs: str, **how: Any) -> Stage:
    return Stage(train_head, {"target": target, "steps": steps, **how}, (f"{target}-answers", *needs))


# Of two stages that can begin, the first in this order does: the longest way to the end comes first.
STAGES = {
    "tokenizer": Stage(train_tokenizer, {}),
    "tiny-llama": Stage(train_target, {"kind": "llama", "steps": 1000}, ("tokenizer",)),
    "tiny-qwen3": Stage(train_target, {"kind": "qwen3", "steps": 700}, ("tokenizer",)),
    "tiny-llama-answers": Stage(answers, {"target": "tiny-llama", "prompts": 4000}, ("tiny-llama",)),
    "tiny-qwen3-answers": Stage(answers, {"target": "tiny-qwen3", "prompts": 4000}, ("tiny-qwen3",)),
    # EAGLE-3 sees as many tokens as P-EAGLE; RESULTS.json counts the operations. The learning rates are the best after
    # 200 steps: of 0.01, 0.02 and 0.04 with one layer, 0.02 and 0.04 with four.
    "tiny-llama-eagle3": _head("tiny-llama", 800, kind="eagle3", layers=1, muon_lr=0.04),
    "tiny-llama-peagle": _head("tiny-llama", 800),
    "tiny-qwen3-peagle": _head("tiny-qwen3", 800),
    "tiny-llama-peagle-d2t": _head("tiny-llama", 40, "tiny-llama-peagle", draft_vocab=256, init="tiny-llama-peagle"),
    "tiny-llama-eagle3-4l": _head("tiny-llama", 800, kind="eagle3", layers=4, depths=3, muon_lr=0.02),
    "tiny-llama-peagle-sharp": Stage(sharpen_head, {"target": "tiny-llama", "prompts": 6000}, ("tiny-llama-peagle",)),
    "tiny-qwen3-peagle-sharp": Stage(sharpen_head, {"target": "tiny-qwen3", "prompts": 6000}, ("tiny-qwen3-peagle",)),
}
# Stages that are built where --only names them; `make sharpen` does the last two.
ASKED_FOR = ("tiny-llama-eagle3-4l", "tiny-llama-peagle-sharp", "tiny-qwen3-peagle-sharp")
