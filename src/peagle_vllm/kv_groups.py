"""The windows of the head's layers, and these layers in vLLM's KV cache groups.

vLLM gives each kind of layer groups of its own, all as large as the smallest kind, and each group costs every request a
block table. A few layers of a new kind, a head's, can split a target's 32 layers into nine groups (vLLM 49730).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheSpec


@contextmanager
def own_windows(vllm_config: VllmConfig) -> Iterator[None]:
    """Load a head under this: its layers see what its own config says.

    Where every layer of the target slides, vLLM gives its window to each layer that names none, the head's too, until
    a draft model has a cache config of its own.
    """
    cache_config = vllm_config.cache_config
    window, cache_config.sliding_window = cache_config.sliding_window, None
    try:
        yield
    finally:
        cache_config.sliding_window = window


def keep_windows_whole(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Let the head's sliding layers keep the KV of all tokens where that spares groups. They attend as before.

    Not where the target has layers of the same window, whose groups they join, or none that see all; nor with
    FlashInfer, whose plan has one window for all layers of a group.
    """
    context = vllm_config.compilation_config.static_forward_context
    layers = {layer for layer in context.values() if isinstance(layer, Attention)}
    ours = layers.intersection(model.modules())
    windows = {layer.sliding_window for layer in layers - ours}
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
