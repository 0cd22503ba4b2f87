"""The windows of the head's layers, and these layers in vLLM's KV cache groups.

vLLM gives each kind of layer groups of its own, all as large as the smallest kind, and each group costs every request a
block table. A few layers of a new kind, a head's, can split a target's 32 layers into nine groups (vLLM 49730).
"""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from peagle_vllm.serving import warn_once


@contextmanager
def own_cache_settings(vllm_config: VllmConfig) -> Iterator[None]:
    """Load a head under this: its layers see what its own config says.

    Where every layer of the target slides, vLLM gives its window to each layer that names none, the head's too, until
    a draft model has a cache config of its own. The cache's dtype is shared likewise: sparse latent attention sets one
    that no layer of a head supports, and a quantized head can set one for its target.
    """
    cache_config, spec = vllm_config.cache_config, vllm_config.speculative_config
    dtype, window, cache_config.sliding_window = cache_config.cache_dtype, cache_config.sliding_window, None
    if dtype.endswith("_ds_mla") and spec.kv_cache_dtype is None:
        spec.kv_cache_dtype = "auto"
    try:
        yield
    finally:
        if cache_config.cache_dtype != dtype:
            spec.kv_cache_dtype, cache_config.cache_dtype = cache_config.cache_dtype, dtype
        cache_config.sliding_window = window


def with_draft_model(vllm_config: VllmConfig) -> VllmConfig:
    """A copy for the attention builders of the head's layers, which size scratch by its heads, not the target's."""
    config = copy.copy(vllm_config)
    config.model_config = copy.copy(vllm_config.speculative_config.draft_model_config)
    config.model_config.max_model_len = vllm_config.model_config.max_model_len
    return config


def keep_windows_whole(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Let the head's sliding layers keep the KV of all tokens where that spares groups. They attend as before.

    Not where the target has layers of the same window, whose groups they join, or none that see all; nor with
    FlashInfer, whose plan has one window for all layers of a group.
    """
    context = vllm_config.compilation_config.static_forward_context
    layers = {layer for layer in context.values() if isinstance(layer, Attention)}
    ours = layers.intersection(model.modules())
    latent = {layer for layer in context.values() if isinstance(layer, MLAAttention)}
    windows = {layer.sliding_window for layer in latent | layers - ours}
    if None not in windows or any("FLASHINFER" in layer.get_attn_backend().get_name() for layer in layers):
        return
    for layer in ours:
        if layer.sliding_window not in windows:
            _keep_whole(layer)


def _keep_whole(layer: Any) -> None:
    window, original = layer.sliding_window, layer.get_kv_cache_spec

    def get_kv_cache_spec(vllm_config: VllmConfig) -> KVCacheSpec:
        layer.sliding_window = None
        try:
            return original(vllm_config)
        finally:
            layer.sliding_window = window

    layer.get_kv_cache_spec = get_kv_cache_spec


def warn_of_split(model: torch.nn.Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Say where the head's layers are a kind of their own, of fewer layers than any of its target's."""
    ours, theirs = Counter[KVCacheSpec](), Counter[KVCacheSpec]()
    for spec, is_ours in _layer_specs(model, vllm_config, kv_cache_config):
        (ours if is_ours else theirs)[spec] += 1
    smallest = min(theirs.values(), default=0)
    few = [spec for spec, count in ours.items() if spec not in theirs and count < smallest]
    if few and len(kv_cache_config.kv_cache_groups) > len({*ours, *theirs}):
        num_groups, num_layers = len(kv_cache_config.kv_cache_groups), sum(ours[spec] for spec in few)
        warn_once(
            f"P-EAGLE: vLLM splits the KV cache into {num_groups} groups, because {num_layers} of the head's layers "
            "are unlike all of the target's. Each group costs host time in every step (vLLM issue 49730). A head joins "
            "the groups of its target where its layers have the same number of KV heads, width and window"
        )


def kv_bytes_a_token(model: torch.nn.Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """What the head's layers keep of a token."""
    specs = _layer_specs(model, vllm_config, kv_cache_config)
    return sum(spec.page_size_bytes // spec.block_size for spec, is_ours in specs if is_ours)


def _layer_specs(
    model: torch.nn.Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> Iterator[tuple[KVCacheSpec, bool]]:
    """Of each layer in a KV cache group, and whether the layer is the head's."""
    layers, ours = vllm_config.compilation_config.static_forward_context, set(model.modules())
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            yield spec, layers.get(name) in ours
