"""A head's files before they are written, and the words of every dialect for what vLLM's own format says.

``tests.heads.writers`` writes tiny heads of them to be read and judged, ``tests.support.random_heads`` and
``tests.drafts.test_dialects`` heads that draft.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
# What the speculators library writes beside the decoder layers' own fields.
BESIDE_LAYERS = (
    *("draft_vocab_size", AUX_KEY, "fc_norm", "mask_token_id", "norm_before_fc", "norm_before_residual"),
    *("target_hidden_size", "dtype"),
)

Tensors = dict[str, torch.Tensor]


@dataclass
class Written:
    """A head before it is written: mutate it, then ``save``."""

    config: dict[str, Any]
    tensors: Tensors
    shards: int = 1

    @property
    def layer_config(self) -> dict[str, Any]:
        return self.config.get("transformer_layer_config", self.config)

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.shards == 1:
            save_file(self.tensors, folder / "model.safetensors")
            return folder
        names, weight_map = sorted(self.tensors), {}
        for i in range(self.shards):
            file = f"model-{i + 1:05}-of-{self.shards:05}.safetensors"
            part = {name: self.tensors[name] for name in names[i :: self.shards]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


def read(folder: Path) -> Written:
    """A head of one file."""
    return Written(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))


def edit(folder: Path, change: Callable[[Written], object]) -> None:
    """Change a head, or a target, of one file."""
    written = read(folder)
    change(written)
    written.save(folder)


def as_aws(head: Written, identity_map: bool = True) -> Written:
    """``midlayer``, ``ptd_token_id``, no count of aux states, and a map even where it maps nothing."""
    head.config["ptd_token_id"] = head.config.pop("mask_token_id")
    head.config.pop("num_aux_hidden_states", None)
    head.tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.tensors.items()}
    vocab = head.config["vocab_size"]
    if identity_map and head.config["draft_vocab_size"] == vocab:
        head.tensors |= {"d2t": torch.zeros(vocab, dtype=torch.long), "t2d": torch.ones(vocab, dtype=torch.bool)}
    return head


def as_flat(head: Written) -> Written:
    """What the AWS training code writes: the architecture of a plain Llama."""
    as_aws(head).config["architectures"] = ["LlamaForCausalLM"]
    return head


def as_nemo(head: Written) -> Written:
    head.config |= {"architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": True, "num_depths": 8}
    top = ("lm_head.weight", "mask_hidden")
    head.tensors = {name if name in top else f"model.{name}": tensor for name, tensor in head.tensors.items()}
    return head


def as_nemo_first(head: Written) -> Written:
    """As NeMo's first release had it: another class, and ``mask_hidden`` under the prefix too."""
    as_nemo(head).config["architectures"] = ["LlamaPEagleDraftModel"]
    head.tensors["model.mask_hidden"] = head.tensors.pop("mask_hidden")
    return head


def as_specforge(head: Written) -> Written:
    """The mask token is in nobody's config, aux layers stand inside ``eagle_config``."""
    for name in ("mask_token_id", "num_aux_hidden_states"):
        head.config.pop(name, None)
    if ids := head.config.pop(AUX_KEY, None):
        head.config["eagle_config"] = {AUX_KEY: ids, "use_aux_hidden_state": True}
    head.config["architectures"] = ["PEagleDraftModel"]
    return head


def as_speculators(head: Written, target: str | None = None) -> Written:
    """As the speculators library saves it: its own fields beside the layers', no count of aux states."""
    config = head.config
    top = {name: config.pop(name) for name in BESIDE_LAYERS if name in config} | {"target_hidden_size": None}
    config.pop("num_aux_hidden_states", None)
    config["architectures"] = ["LlamaForCausalLM" if config["model_type"] == "llama" else "Qwen3ForCausalLM"]
    head.config = top | {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": config,
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"] if target else []},
        },
    }
    return head


def as_target_ids(head: Written) -> Written:
    """The map as target ids, and no ``t2d``."""
    del head.tensors["t2d"]
    head.tensors["d2t"] = head.tensors["d2t"] + torch.arange(len(head.tensors["d2t"]))
    return head
