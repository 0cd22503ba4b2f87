"""The same weights in every dialect's words, for an engine to draft with.

``tiny_heads`` writes the weights; here they get another dialect's names and config.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support import dialects as words
from tests.support import random_heads as tiny_heads
from tests.support.dialects import Written
from tests.support.random_heads import MASK_TOKEN, HeadSpec


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
        return replace(self.spec, fmt="vllm"), self.layers, self.dtype


def read(folder: Path) -> Written:
    return Written(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))


def write_own(folder: Path, target: Path, case: Case) -> Path:
    """The head in vLLM's own format, written from its facts and not by ``convert``."""
    head = read(tiny_heads.write_head(folder, target, replace(case.spec, fmt="vllm")))
    head.config |= dict(case.layers)
    for name, tensor in head.tensors.items():
        head.tensors[name] = tensor.to(case.dtype) if tensor.is_floating_point() else tensor
    return head.save(folder)


def write_dialect(folder: Path, plain: Path, case: Case) -> Path:
    """The head of ``own`` in the dialect's words."""
    head = read(plain)
    head.shards = case.shards
    case.rewrite(head)
    return head.save(folder)


def specforge_with_id(head: Written) -> None:
    words.as_specforge(head).config["mask_token_id"] = MASK_TOKEN


LLAMA, QWEN3 = HeadSpec(), HeadSpec(family="qwen3")
REDUCED = HeadSpec(draft_vocab=200)
BARE = HeadSpec(own_embeddings=False, own_lm_head=False, norm_before_residual=True)
WINDOW = (("layer_types", ["sliding_attention", "sliding_attention"]), ("sliding_window", 8))
MIXED = (("layer_types", ["full_attention", "sliding_attention"]), ("sliding_window", 8))
NO_ID = ("--mask-token-id", str(MASK_TOKEN))

CASES = {
    "aws": Case(LLAMA, words.as_aws),
    "aws-bf16": Case(LLAMA, words.as_aws, dtype=torch.bfloat16),
    "aws-bare": Case(BARE, words.as_aws),
    "flat": Case(REDUCED, words.as_flat),
    "nemo": Case(LLAMA, words.as_nemo),
    "nemo-first": Case(LLAMA, words.as_nemo_first, shards=2),
    "nemo-fc_norm": Case(HeadSpec(fc_norm=True), words.as_nemo),
    "nemo-qwen3": Case(QWEN3, words.as_nemo),
    "specforge-with-id": Case(LLAMA, specforge_with_id),
    "specforge": Case(LLAMA, words.as_specforge, direct=False, options=NO_ID),
    "speculators": Case(REDUCED, words.as_speculators),
    "speculators-sharded": Case(LLAMA, words.as_speculators, shards=3),
    "speculators-fp16": Case(LLAMA, words.as_speculators, dtype=torch.float16),
    "speculators-bare": Case(BARE, words.as_speculators),
    "speculators-qwen3": Case(QWEN3, words.as_speculators),
    "speculators-4-aux": Case(HeadSpec(aux_layers=(1, 3, 5, 7)), words.as_speculators),
    "speculators-5-aux": Case(HeadSpec(aux_layers=(1, 2, 4, 6, 8), fc_norm=True), words.as_speculators),
    "speculators-5-aux-qwen3": Case(HeadSpec(family="qwen3", aux_layers=(1, 2, 4, 6, 8)), words.as_speculators),
    "speculators-norm_before_fc": Case(HeadSpec(norm_before_fc=True), words.as_speculators),
    "speculators-window": Case(LLAMA, words.as_speculators, layers=WINDOW),
    "speculators-window-qwen3": Case(QWEN3, words.as_speculators, layers=(*WINDOW, ("use_sliding_window", True))),
    "speculators-mixed": Case(LLAMA, words.as_speculators, layers=MIXED, v2=True),
    "target ids": Case(REDUCED, words.as_target_ids, direct=False),
}
