"""vLLM's own ``"quantization"`` in the speculative config: a head's layers in 8 bits while they are loaded."""

import pytest
import torch

from peagle_tools.shared.acceptance import read_engine
from tests.support.engines import Request, Settings, engine, shut_down
from tests.support.models import PEAGLE, TARGET, prompt_token_ids

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")


def test_vllm_quantizes_a_head_while_it_loads_it():
    """Layers and ``fc``, not ``lm_head``. Of the methods for linear layers a CPU has kernels for this one."""
    online = (("quantization", "fp8_per_channel"),)
    settings = Settings(TARGET, PEAGLE, k=3, dtype="bfloat16", speculative=online, llm=(("disable_log_stats", False),))
    served = engine(settings)
    try:
        model = served.drafter.model
        for layer in (*model.model.layers, None):
            weight = layer.mlp.down_proj.weight if layer else model.model.fc.weight
            assert weight.dtype == torch.float8_e4m3fn
        assert model.lm_head.weight.dtype == torch.bfloat16
        served.run([Request(str(i), tuple(ids[:60]), 24) for i, ids in enumerate(prompt_token_ids()[:4])])
        assert read_engine(served.llm).length > 1.7  # of drafts that mean nothing: 1.0
    finally:
        shut_down()
