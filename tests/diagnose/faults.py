"""Faults planted in copies of the tiny pairs, which ``diagnose`` has to name, and healthy heads, where it must not."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.models import PEAGLE, PEAGLE_REDUCED, QWEN3, QWEN3_PEAGLE, TARGET

Plant = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]  # changes a head's config and weights


@dataclass(frozen=True)
class Case:
    """``said``: what names the fault: a cause, a line of the comparison or of the curve, or a reason of ``inspect``."""

    target: Path
    head: Path
    said: str
    plant: Plant = lambda config, weights: None
    options: tuple[str, ...] = ()
    template: bool = True  # whether the target has its chat template

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Target and head, as folders."""
        target, head = self.target, folder / "head"
        if not self.template:
            target = folder / "target"
            shutil.copytree(self.target, target)
            tokenizer = target / "tokenizer_config.json"
            settings = json.loads(tokenizer.read_text())
            del settings["chat_template"]
            tokenizer.write_text(json.dumps(settings))
        head.mkdir(parents=True)
        config, weights = (
            json.loads((self.head / "config.json").read_text()),
            load_file(self.head / "model.safetensors"),
        )
        self.plant(config, weights)
        (head / "config.json").write_text(json.dumps(config))
        save_file({name: weight.contiguous() for name, weight in weights.items()}, head / "model.safetensors")
        return target, head

    def is_named(self, lines: list[str]) -> bool:
        """Whether a line names the fault, and no other cause is named beside it."""
        causes = [line for line in lines if line.startswith("cause")]
        return any(self.said in line for line in lines) and all(self.said in line for line in causes)


def said(out: str, err: str) -> list[str]:
    """What a run of ``diagnose --json`` names, a line each."""
    if not out:
        return [line for line in err.splitlines() if line.startswith("error: ")]
    data = json.loads(out)
    causes = [f"cause: {cause['change']} ({cause['gain']:+.0%})" for cause in data["causes"]]
    return [*causes, *data["differences"], *data["odd"][-1:]]


def config(**fields: Any) -> Plant:
    return lambda config, weights: config.update(fields)


def layers(**fields: Any) -> Plant:
    return lambda config, weights: config["transformer_layer_config"].update(fields)


def mask_hidden(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return lambda config, weights: weights.update(mask_hidden=change(weights["mask_hidden"]))


def target_ids(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"] += torch.arange(len(weights["d2t"]))


LLAMA, QWEN = (TARGET, PEAGLE), (QWEN3, QWEN3_PEAGLE)
AUX = "eagle_aux_hidden_state_layer_ids"
LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 8.0}
FAULTS: Mapping[str, Case] = {
    "prompts without the chat template": Case(*QWEN, "cause: prompts through the chat template", options=("--raw",)),
    "target without a chat template": Case(*LLAMA, "has no chat template", template=False),
    "aux layers one too low": Case(*LLAMA, "cause: aux layers [2, 5, 7] for [1, 4, 6]", config(**{AUX: [1, 4, 6]})),
    "aux layers one too high": Case(*QWEN, "cause: aux layers [2, 5, 7] for [3, 6, 8]", config(**{AUX: [3, 6, 8]})),
    "rope theta": Case(*LLAMA, "cause: rope theta 10000.0", layers(rope_parameters={"rope_theta": 100.0})),
    "rope scaling": Case(*QWEN, "cause: rope scaling", layers(rope_parameters=LINEAR)),
    "rms eps": Case(*LLAMA, "cause: rms_norm_eps 1e-05", layers(rms_norm_eps=0.5)),
    "mask token": Case(*LLAMA, "cause: mask token 6 (<|mask|>) for 300", config(mask_token_id=300)),
    "mask_hidden swapped": Case(
        *LLAMA,
        "cause: the parts of mask_hidden in the order [2, 1, 0]",
        mask_hidden(lambda m: m.view(3, -1)[[2, 1, 0]].reshape(m.shape)),
    ),
    "mask_hidden rotated": Case(*QWEN, "mask_hidden", mask_hidden(lambda m: m.roll(17))),
    "norm_before_residual": Case(*LLAMA, "cause: norm_before_residual False", config(norm_before_residual=True)),
    "fc_norm": Case(*LLAMA, "fc_norm is set, the weights hold no fc_norm", config(fc_norm=True)),
    "norm_before_fc": Case(*QWEN, "norm_before_fc is set", config(norm_before_fc=True)),
    "d2t with target ids": Case(TARGET, PEAGLE_REDUCED, "d2t holds target ids", target_ids),
}
HEALTHY = {
    f"{pair[1].name}, K={k}": (*pair, k) for pair in (LLAMA, (TARGET, PEAGLE_REDUCED), QWEN) for k in range(3, 9)
}
