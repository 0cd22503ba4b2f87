"""A head loaded as the server loads it, and its logits, in 20 ms: an engine for each of a thousand heads takes an hour.

The configuration is checked, and the head built and loaded, by the code of the server; only attention is computed here,
because vLLM's needs a KV cache.
"""

import copy
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from tests.support.engines import Engine

ROWS = 24


def load(live: Engine, head: Path, *, stock: bool = False) -> torch.Tensor:
    """Float32 [ROWS, vocabulary] logits of a head on random rows.

    Args:
        live: an engine of the head's target, which lends its configuration.
        stock: whether vLLM reads the head's config by itself.
    """
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader import get_model

    base = live.llm.llm_engine.vllm_config
    compilation = copy.copy(base.compilation_config)
    compilation.static_forward_context = {}  # the layers of each head have the same names
    arguments: dict[str, Any] = {"model": str(head), "num_speculative_tokens": 5, "prompt_lookup_min": 0}
    arguments |= {"method": "eagle3", "parallel_drafting": True}
    with ExitStack() as stack:
        stack.enter_context(patch("time.sleep"))  # vLLM tries twice to read a config
        if stock:
            own = SpeculativeConfig.__post_init__.__wrapped__
            stack.enter_context(patch.object(SpeculativeConfig, "__post_init__", own))
        spec = SpeculativeConfig(
            target_model_config=base.model_config, target_parallel_config=base.parallel_config, **arguments
        )
        config = replace(base, speculative_config=spec, compilation_config=compilation)
        stack.enter_context(set_current_vllm_config(config))
        model = get_model(vllm_config=config, model_config=spec.draft_model_config, load_config=base.load_config)
        stack.enter_context(patch.object(Attention, "forward", attend))
        stack.enter_context(set_forward_context(None, config))
        with torch.inference_mode():
            gen = torch.Generator().manual_seed(0)
            tokens = torch.randint(3, 500, (ROWS,), generator=gen)
            aux = torch.randn(ROWS, model.model.fc_input_size, generator=gen)
            hidden, _ = model(tokens, torch.arange(ROWS), model.combine_hidden_states(aux))
            return model.compute_logits(hidden)


def attend(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence, in place of vLLM's ``Attention.forward``."""
    q, k, v = (t.view(len(t), -1, layer.head_size).transpose(0, 1) for t in (query, key, value))
    distance = torch.arange(ROWS)[:, None] - torch.arange(ROWS)
    visible = (distance >= 0) & (distance < (layer.sliding_window or ROWS)) | (layer.attn_type != "decoder")
    mixed = F.scaled_dot_product_attention(q, k, v, visible, scale=layer.impl.scale, enable_gqa=True)
    return mixed.transpose(0, 1).reshape(ROWS, -1)
