"""Tiny heads of every dialect, written from the facts of their formats."""

from typing import Any

import torch

from peagle_vllm.heads.target import Target
from tests.support.dialects import AUX_KEY, Written, as_aws, as_flat, as_nemo, as_specforge, as_speculators
from tests.support.random_heads import HIDDEN, MASK_TOKEN, TARGET_LAYERS, VOCAB, HeadSpec, make_head

DRAFT_VOCAB = 384
TARGET = Target(name="some/target", hidden_size=HIDDEN, vocab_size=VOCAB, num_layers=TARGET_LAYERS)
AUX = {3: (2, 4, 5), 4: (1, 3, 5, 7), 5: (1, 2, 4, 6, 8)}


def vllm(family: str = "llama", draft_vocab: int = DRAFT_VOCAB, num_aux: int | None = 3) -> Written:
    """vLLM's own names, nothing in need of a mapping. Without ``num_aux`` its default aux layers are read."""
    spec = HeadSpec(family, draft_vocab=draft_vocab, norm_before_residual=True, aux_layers=AUX[num_aux or 3])
    head = make_head(spec, torch.Generator().manual_seed(0))
    del head.config["num_aux_hidden_states"]
    if num_aux is None:
        del head.config[AUX_KEY]
    return head


def speculators(family: str = "llama", num_aux: int = 3, draft_vocab: int = VOCAB) -> Written:
    head = as_speculators(vllm(family, draft_vocab, num_aux), TARGET.name)
    if family == "llama" and num_aux != 3:  # what vLLM's Llama class wants to be told
        head.layer_config["num_aux_hidden_states"] = num_aux
    return head


def aws() -> Written:
    return as_aws(vllm(draft_vocab=VOCAB, num_aux=None))


def flat() -> Written:
    return as_flat(vllm(num_aux=None))


def specforge(**fields: Any) -> Written:
    """No mask token id in its JSON, but where ``fields`` put one, as a user would."""
    head = as_specforge(vllm(num_aux=None))
    head.config |= fields
    return head


def nemo(family: str = "llama") -> Written:
    return as_nemo(vllm(family, VOCAB, num_aux=None))


# Heads that vLLM 0.32 loads as they are, or with what this package maps.
SERVED = {
    "speculators-llama": speculators,
    "speculators-qwen3": lambda: speculators("qwen3"),
    "speculators-reduced": lambda: speculators(draft_vocab=DRAFT_VOCAB),
    "speculators-llama-4-aux": lambda: speculators(num_aux=4),
    "speculators-qwen3-5-aux": lambda: speculators("qwen3", num_aux=5),
    "aws": aws,
    "flat": flat,
    "vllm-llama": vllm,
    "vllm-qwen3": lambda: vllm("qwen3"),
    "nemo": nemo,
    "nemo-qwen3": lambda: nemo("qwen3"),
    "specforge-with-id": lambda: specforge(mask_token_id=MASK_TOKEN),
}
# Heads that need a conversion first.
FOREIGN = {"specforge": specforge}
