"""Tiny heads, batches and gradients: one step of speculators' own model, and the same step in parts."""

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from speculators.models import peagle
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from peagle_tools.train.draft_model import PEagleDraftModel

VOCAB, DRAFT_VOCAB = 24, 20
HIDDEN, NUM_AUX = 16, 3
LAYERS = 2
CONFIGS = {"llama": (LlamaConfig, 2), "qwen3": (Qwen3Config, 1)}  # class, KV heads of 4 query heads


@dataclass(frozen=True)
class Shape:
    """A head; ``norms`` are the norms before ``fc``."""

    family: str = "llama"
    norms: str = ""
    dtype: torch.dtype = torch.float32
    draft_vocab: int = DRAFT_VOCAB


def config_of(shape: Shape) -> peagle.PEagleSpeculatorConfig:
    config_class, kv_heads = CONFIGS[shape.family]
    layer = config_class(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=HIDDEN // 4,
        vocab_size=VOCAB,
        max_position_embeddings=512,
    )
    layer._attn_implementation = "sdpa"
    return peagle.PEagleSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.draft_vocab,
        eagle_aux_hidden_state_layer_ids=list(range(NUM_AUX)),
        mask_token_id=1,
        **({shape.norms: True} if shape.norms else {}),
    )


def exact_norm(module: torch.nn.Module) -> None:
    """transformers' norms compute in float32; let this one compute in the dtype it is given."""
    module.forward = lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


@cache
def pair(shape: Shape) -> tuple[peagle.PEagleDraftModel, PEagleDraftModel]:
    """speculators' head, and ours with the same weights."""
    torch.manual_seed(7)
    flat = peagle.PEagleDraftModel(config_of(shape))
    for weight in flat.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    parts = PEagleDraftModel(copy.deepcopy(flat.config))
    parts.load_state_dict(flat.state_dict())
    for head in (flat, parts):
        head.to(shape.dtype).train().lm_head.weight.requires_grad_(shape.norms != "")
        if shape.dtype == torch.float64:
            for module in head.modules():
                if hasattr(module, "variance_epsilon"):
                    exact_norm(module)
    return flat, parts


def batch(documents: list[int], supervised: list[int], dtype: torch.dtype, padding: int = 0) -> dict[str, Tensor]:
    """One packed sequence of documents of these lengths, supervised at these positions."""
    ids = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    ids = torch.cat([ids, torch.full((padding,), -1)])
    loss_mask = torch.zeros(len(ids))
    loss_mask[supervised] = 1
    return {
        "hidden_states": torch.randn(1, len(ids), NUM_AUX * HIDDEN, dtype=dtype),
        "input_ids": torch.randint(VOCAB, (1, len(ids))),
        "document_ids": ids[None],
        "loss_mask": loss_mask[None],
        "verifier_last_hidden_states": torch.randn(1, len(ids), HIDDEN, dtype=dtype),
    }


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each row, in the dtype of the logits, where speculators' losses are in float32."""
    return -(targets.softmax(-1) * logits.log_softmax(-1)).sum(-1)


LOSS = {"ce": (cross_entropy, 1.0)}


def step(head: torch.nn.Module, batch: dict[str, Tensor], seed: int, **options: Any) -> tuple[dict, dict, dict]:
    """Loss, metrics and gradients by name of one step."""
    head.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss, metrics = head(**batch, **options)[1:]
    loss.backward()
    gradients = {name: weight.grad for name, weight in head.named_parameters() if weight.requires_grad}
    return {"loss": loss.detach()}, metrics, gradients


def furthest(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of a tensor relative to its own largest number; a tensor that is all zero must be zero."""
    assert actual.keys() == wanted.keys()
    errors = [0.0]
    for name, value in wanted.items():
        assert actual[name] is not None, f"{name} has no gradient"
        error, size = (actual[name] - value).abs().max(), value.abs().max()
        errors.append(float(error / size) if size else float(error))
    return max(errors)
