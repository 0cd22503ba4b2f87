"""The same weights in every dialect's words, for an engine to draft with.

``tiny_heads`` writes the weights; here they get another dialect's names and config.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support import random_heads as tiny_heads
from tests.support.random_heads import MASK_TOKEN, VOCAB, HeadSpec

Weights = dict[str, torch.Tensor]
Rewrite = Callable[[dict, Weights], tuple[dict, Weights]]


@dataclass(frozen=True)
class Case:
    """A head in one dialect.

    Attributes:
        spec: its weights and norms; ``fmt`` does not matter.
        rewrite: vLLM's own config and names into the dialect's.
        layers: more fields of the decoder layers.
        dtype: in which the weights are stored, exactly.
        shards: files that hold them.
        v2: whether only Model Runner V2 can serve it.
        direct: whether vLLM is served this head as it is; the others need convert.
        options: of convert.
    """

    spec: HeadSpec
    rewrite: Rewrite
    layers: tuple[tuple[str, object], ...] = ()
    dtype: torch.dtype = torch.float32
    shards: int = 1
    v2: bool = False
    direct: bool = True
    options: tuple[str, ...] = field(default=())

    @property
    def weights(self) -> tuple:
        """What tells one set of weights, and what is done with them, from another."""
        return replace(self.spec, fmt="aws"), self.layers, self.dtype


def write_own(folder: Path, target: Path, case: Case) -> Path:
    """The head in vLLM's own format, written from its facts and not by ``convert``."""
    tiny_heads.write_head(folder, target, replace(case.spec, fmt="aws"))
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    config["mask_token_id"] = config.pop("ptd_token_id")
    config |= dict(case.layers)
    weights = {name.replace("midlayer.", "layers.0."): _stored(tensor, case.dtype) for name, tensor in weights.items()}
    return _save(folder, config, weights)


def write_dialect(folder: Path, own: Path, case: Case) -> Path:
    """The head of ``own`` in the dialect's words."""
    config = json.loads((own / "config.json").read_text())
    return _save(folder, *case.rewrite(config, load_file(own / "model.safetensors")), shards=case.shards)


def _stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _save(folder: Path, config: dict, weights: Weights, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    names = sorted(weights)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({name: weights[name] for name in names[i::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


# ----------------------------------------------------------------------------------------- the dialects


def own(config: dict, weights: Weights) -> tuple[dict, Weights]:
    return config, weights


def aws(config: dict, weights: Weights) -> tuple[dict, Weights]:
    """``midlayer``, ``ptd_token_id``, no count of aux states, and a map even where it maps nothing."""
    config["ptd_token_id"] = config.pop("mask_token_id")
    del config["num_aux_hidden_states"]
    weights = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}
    identity = {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    return config, identity | weights if config["draft_vocab_size"] == VOCAB else weights


def flat(config: dict, weights: Weights) -> tuple[dict, Weights]:
    config, weights = aws(config, weights)
    return config | {"architectures": ["LlamaForCausalLM"]}, weights


def nemo(config: dict, weights: Weights) -> tuple[dict, Weights]:
    config |= {"architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": True, "num_depths": 8}
    return config, {n if n in ("lm_head.weight", "mask_hidden") else f"model.{n}": t for n, t in weights.items()}


def nemo_first(config: dict, weights: Weights) -> tuple[dict, Weights]:
    """As NeMo's first release had it: another class, and ``mask_hidden`` under the prefix too."""
    config, weights = nemo(config, weights)
    weights["model.mask_hidden"] = weights.pop("mask_hidden")
    return config | {"architectures": ["LlamaPEagleDraftModel"]}, weights


def specforge(config: dict, weights: Weights) -> tuple[dict, Weights]:
    """The mask token is in nobody's config, aux layers stand inside ``eagle_config``."""
    del config["mask_token_id"], config["num_aux_hidden_states"]
    ids = config.pop("eagle_aux_hidden_state_layer_ids")
    eagle = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return config | {"architectures": ["PEagleDraftModel"], "eagle_config": eagle}, weights


def specforge_mended(config: dict, weights: Weights) -> tuple[dict, Weights]:
    config, weights = specforge(config, weights)
    return config | {"mask_token_id": MASK_TOKEN}, weights


def speculators(config: dict, weights: Weights) -> tuple[dict, Weights]:
    """As the speculators library saves it: its own fields beside the layers', no count of aux states."""
    names = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "fc_norm", "mask_token_id", "norm_before_fc")
    names += ("norm_before_residual",)
    top = {name: config.pop(name) for name in names} | {"target_hidden_size": None}
    del config["num_aux_hidden_states"], config["target_hidden_size"]
    family = config["model_type"]
    config["architectures"] = ["LlamaForCausalLM" if family == "llama" else "Qwen3ForCausalLM"]
    method = {"proposal_type": "greedy", "speculative_tokens": 8}
    return top | {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": config,
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }, weights


def target_ids(config: dict, weights: Weights) -> tuple[dict, Weights]:
    """The map as target ids, and no ``t2d``."""
    del weights["t2d"]
    weights["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]))
    return config, weights


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
