"""A live V2 speculator with graphs, but without a GPU: it finds one for its batch, and replaying it does nothing.

What is left of ``propose()`` is the host's share: Python, PyTorch's dispatch of what is in no graph, and the arguments
of Triton launches.
"""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


class Graph:
    """Stands for a captured graph.

    Attributes:
        replays: of all of them.
    """

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


def give_graphs(drafter: Any, batches: Sequence[int], k: int) -> None:
    """FULL graphs for decode batches of these sizes, as with FlashAttention: metadata is refreshed inside them.

    Args:
        drafter: an ``EagleSpeculator``, of an engine without graphs that is still running.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu import cudagraph_utils

    drafter.vllm_config = copy.copy(drafter.vllm_config)
    compilation = drafter.vllm_config.compilation_config = copy.copy(drafter.vllm_config.compilation_config)
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    compilation.cudagraph_capture_sizes = sorted({*batches, *(n * (1 + k) for n in batches)})
    compilation.max_cudagraph_capture_size = max(batches) * (1 + k)
    if hasattr(drafter, "_allocate_buffers"):  # ours: as large as the largest graph
        drafter._allocate_buffers()
        attention = ("model_state", "kv_cache_config", "block_tables", "target_input_buffers", "target_attn_groups")
        drafter.set_attn(*(getattr(drafter, name) for name in attention))
    drafter.supports_decode_metadata_update = True
    drafter.attn_cg_support = SimpleNamespace(min_cg_support=AttentionCGSupport.UNIFORM_BATCH, min_cg_attn_backend=None)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    with patch.object(cudagraph_utils, "current_platform", platform):
        drafter.init_cudagraph_manager(compilation.cudagraph_mode)
    for manager in vars(drafter).values():
        if isinstance(manager, cudagraph_utils.CudaGraphManager):
            manager.graphs = {desc: Graph() for descs in manager._capture_descs.values() for desc in descs}
            manager._graphs_captured = True
