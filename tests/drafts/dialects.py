"""The same weights in every dialect's words, for an engine to draft with.

``tiny_heads`` writes the weights; here they get another dialect's names and config.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.heads.writers import Written
from tests.support import random_heads as tiny_heads
from tests.support.random_heads import MASK_TOKEN, VOCAB, HeadSpec


@dataclass(frozen=True)
class Case:
    """A head in one dialect."""

    spec: HeadSpec  # its weights and norms; ``fmt`` does not matter
    rewrite: Callable[[Written], object]  # vLLM's own config and names into the dialect's
    layers: tuple[tuple[str, object], ...] = ()  # more fields of the decoder layers
    dtype: torch.dtype = torch.float32  # in which the weights are stored, exactly
    shards: int = 1  # files that hold them
    v2: bool = False  # whether only Model Runner V2 can serve it
    direct: bool = True  # whether vLLM is served this head as it is; the others need convert
    options: tuple[str, ...] = ()  # of convert

    @property
    def weights(self) -> tuple:
        """What tells one set of weights, and what is done with them, from another."""
        return replace(self.spec, fmt="aws"), self.layers, self.dtype


def read(folder: Path) -> Written:
    return Written(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))


def write_own(folder: Path, target: Path, case: Case) -> Path:
    """The head in vLLM's own format, written from its facts and not by ``convert``."""
    head = read(tiny_heads.write_head(folder, target, replace(case.spec, fmt="aws")))
    head.config["mask_token_id"] = head.config.pop("ptd_token_id")
    head.config |= dict(case.layers)
    head.tensors = {
        name.replace("midlayer.", "layers.0."): tensor.to(case.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in head.tensors.items()
    }
    return head.save(folder)


def write_dialect(folder: Path, own: Path, case: Case) -> Path:
    """The head of ``own`` in the dialect's words."""
    head = read(own)
    head.shards = case.shards
    case.rewrite(head)
    return head.save(folder)


def aws(head: Written) -> None:
    """``midlayer``, ``ptd_token_id``, no count of aux states, and a map even where it maps nothing."""
    head.config["ptd_token_id"] = head.config.pop("mask_token_id")
    del head.config["num_aux_hidden_states"]
    head.tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.tensors.items()}
    if head.config["draft_vocab_size"] == VOCAB:
        head.tensors |= {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}


def flat(head: Written) -> None:
    aws(head)
    head.config["architectures"] = ["LlamaForCausalLM"]


def nemo(head: Written) -> None:
    head.config |= {"architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": True, "num_depths": 8}
    top = ("lm_head.weight", "mask_hidden")
    head.tensors = {name if name in top else f"model.{name}": tensor for name, tensor in head.tensors.items()}


def nemo_first(head: Written) -> None:
    """As NeMo's first release had it: another class, and ``mask_hidden`` under the prefix too."""
    nemo(head)
    head.tensors["model.mask_hidden"] = head.tensors.pop("mask_hidden")
    head.config["architectures"] = ["LlamaPEagleDraftModel"]


def specforge(head: Written) -> None:
    """The mask token is in nobody's config, aux layers stand inside ``eagle_config``."""
    del head.config["mask_token_id"], head.config["num_aux_hidden_states"]
    ids = head.config.pop("eagle_aux_hidden_state_layer_ids")
    eagle = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    head.config |= {"architectures": ["PEagleDraftModel"], "eagle_config": eagle}


def specforge_mended(head: Written) -> None:
    specforge(head)
    head.config["mask_token_id"] = MASK_TOKEN


def speculators(head: Written) -> None:
    """As the speculators library saves it: its own fields beside the layers', no count of aux states."""
    config = head.config
    names = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "fc_norm", "mask_token_id", "norm_before_fc")
    top = {name: config.pop(name) for name in (*names, "norm_before_residual")} | {"target_hidden_size": None}
    del config["num_aux_hidden_states"], config["target_hidden_size"]
    config["architectures"] = ["LlamaForCausalLM" if config["model_type"] == "llama" else "Qwen3ForCausalLM"]
    head.config = top | {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": config,
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def target_ids(head: Written) -> None:
    """The map as target ids, and no ``t2d``."""
    del head.tensors["t2d"]
    head.tensors["d2t"] = head.tensors["d2t"] + torch.arange(len(head.tensors["d2t"]))


LLAMA, QWEN3 = HeadSpec(), HeadSpec(family="qwen3")
REDUCED = HeadSpec(draft_vocab=200)
BARE = HeadSpec(own_embeddings=False, own_lm_head=False, norm_before_residual=True)
WINDOW = (("layer_types", ["sliding_attention", "sliding_attention"]), ("sliding_window", 8))
MIXED = (("layer_types", ["full_attention", "sliding_attention"]), ("sliding_window", 8))
NO_ID = ("--mask-token-id", str(MASK_TOKEN))

CASES = {
    "aws": Case(LLAMA, aws),
    "aws-bf16": Case(LLAMA, aws, dtype=torch.bfloat16),
    "aws-bare": Case(BARE, aws),
    "flat": Case(REDUCED, flat),
    "nemo": Case(LLAMA, nemo),
    "nemo-first": Case(LLAMA, nemo_first, shards=2),
    "nemo-fc_norm": Case(HeadSpec(fc_norm=True), nemo),
    "nemo-qwen3": Case(QWEN3, nemo),
    "specforge-with-id": Case(LLAMA, specforge_mended),
    "specforge": Case(LLAMA, specforge, direct=False, options=NO_ID),
    "speculators": Case(REDUCED, speculators),
    "speculators-sharded": Case(LLAMA, speculators, shards=3),
    "speculators-fp16": Case(LLAMA, speculators, dtype=torch.float16),
    "speculators-bare": Case(BARE, speculators),
    "speculators-qwen3": Case(QWEN3, speculators),
    "speculators-4-aux": Case(HeadSpec(aux_layers=(1, 3, 5, 7)), speculators),
    "speculators-5-aux": Case(HeadSpec(aux_layers=(1, 2, 4, 6, 8), fc_norm=True), speculators),
    "speculators-5-aux-qwen3": Case(HeadSpec(family="qwen3", aux_layers=(1, 2, 4, 6, 8)), speculators),
    "speculators-norm_before_fc": Case(HeadSpec(norm_before_fc=True), speculators),
    "speculators-window": Case(LLAMA, speculators, layers=WINDOW),
    "speculators-window-qwen3": Case(QWEN3, speculators, layers=(*WINDOW, ("use_sliding_window", True))),
    "speculators-mixed": Case(LLAMA, speculators, layers=MIXED, v2=True),
    "target ids": Case(REDUCED, target_ids, direct=False),
}
