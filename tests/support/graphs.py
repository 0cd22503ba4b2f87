"""CUDA graphs on a CPU: what capture would have recorded, run again.

``emulate`` gives a live V2 engine the product's own graph manager, with vLLM's capture and replay replaced:

* A FULL graph is the function that vLLM would record, made once for each shape; replay calls it again. So, as in a
  graph, every Python number and every tensor address of the product is the one of capture time, attention metadata
  included, and only the contents of persistent buffers are new.
* A PIECEWISE graph is the drafter's forward; replay checks that its inputs stand where they stood, and its output goes
  where it went.
* The CPU's attention backend refreshes its metadata as FlashAttention does, in place and from the tensors that the
  metadata holds (``in_place``), or as backends do that vLLM rebuilds before a replay, into buffers of their own.
  Nothing else in captured metadata is renewed: what the product leaves stale there spoils drafts here, as on a GPU.
* Memory is profiled by vLLM's own function (``profiled``), which captures on a small KV cache and in a graph pool that
  it then throws away, before the KV cache and the graphs that serve are made. What a replay uses must be of the second.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.support.engines import Engine


@dataclass
class Seen:
    """What was captured and replayed."""

    # (requests, rows a request) of FULL graphs, those of memory profiling included.
    captured: list[tuple[int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # rows of PIECEWISE graphs
    replayed: Counter[tuple[int, int]] = field(default_factory=Counter)  # how often each FULL graph served a batch
    pieces: Counter[int] = field(default_factory=Counter)  # the same of PIECEWISE graphs
    padded: int = 0  # FULL replays with more requests than the batch had
    unequal: int = 0  # FULL replays of batches whose requests verified different numbers of rows
    depths: Counter[int] = field(default_factory=Counter)  # K of each FULL replay
    steps: int = 0

    @property
    def eager(self) -> int:
        """Draft batches that no graph served."""
        return self.steps - self.replayed.total() - self.pieces.total()


@contextmanager
def emulate(
    engine: Engine,
    request_counts: Sequence[int],
    sizes: Sequence[int] = (),
    mode: str = "FULL_AND_PIECEWISE",
    in_place: bool = True,
    kernel_blocks: bool = False,
    profiled: bool = False,
) -> Iterator[Seen]:
    """Serve draft batches from "graphs" until the end of the block.

    Args:
        request_counts: of the target's decode graphs.
        sizes: more capture sizes of the target, in rows.
        mode: the target's cudagraph_mode.
        in_place: the backend refreshes its metadata inside the graph.
        kernel_blocks: the backend reads a block table of its own, mapped from the KV cache manager's.
        profiled: start as vLLM does without ``kv_cache_memory_bytes``. Not for an engine with cached prefixes.
    """
    from vllm.config.compilation import CUDAGraphMode

    drafter, seen = engine.drafter, Seen()
    stock = engine.drafter.vllm_config
    num_query = 1 + stock.num_speculative_tokens
    config = copy.copy(stock)
    config.compilation_config = copy.copy(stock.compilation_config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    config.compilation_config.cudagraph_capture_sizes = sorted({n * num_query for n in request_counts} | set(sizes))
    config.compilation_config.max_cudagraph_capture_size = config.compilation_config.cudagraph_capture_sizes[-1]
    kv_cache_config = engine.runner.kv_cache_config
    try:
        with ExitStack() as patches, torch.inference_mode():
            _graphs_without_a_gpu(patches, seen)
            _backend_with_graphs(patches, in_place)
            start_over(drafter, config)
            if profiled:
                _profile_memory(engine, config)
            if kernel_blocks:
                _give_kernel_block_tables(drafter)
            if not profiled:
                drafter.init_cudagraph_manager(CUDAGraphMode[mode])
            drafter.capture()
            seen.replayed.clear()
            seen.pieces.clear()
            _note_steps(patches, drafter, seen)
            yield seen
    finally:
        drafter.vllm_config = stock
        if profiled:
            engine.worker.initialize_from_config(kv_cache_config)
        with torch.inference_mode():
            start_over(drafter, stock)
        drafter.cudagraph_manager = None


def start_over(drafter: Any, config: Any) -> None:
    """The drafter's own set-up, for another configuration."""
    drafter.vllm_config = config
    drafter._allocate_buffers()
    kv = drafter.kv_cache_config, drafter.block_tables
    drafter.set_attn(drafter.model_state, *kv, drafter.target_input_buffers, drafter.target_attn_groups)


def _profile_memory(engine: Engine, config: Any) -> None:
    """vLLM's profiling of graph memory, then its KV cache as it was. The target has no graphs."""
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner

    runner, kv_cache_config = engine.runner, engine.runner.kv_cache_config

    def capture_model(profile_only: bool) -> int:
        engine.drafter.capture()
        return 0

    compilation = config.compilation_config
    with (
        patch.multiple(runner, vllm_config=config, compilation_config=compilation, capture_model=capture_model),
        patch.object(model_runner, "has_compiled_submodule", lambda model: True),
    ):
        cudagraph_utils.profile_cudagraph_memory(runner)
        assert engine.drafter.cudagraph_manager is None, "vLLM drops the managers that it finds"
        engine.worker.initialize_from_config(kv_cache_config)


def _graphs_without_a_gpu(patches: ExitStack, seen: Seen) -> None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker.gpu import cudagraph_utils

    from peagle_vllm.v2 import speculator

    captured: dict[int, tuple[list[tuple[int, torch.Size]], tuple[torch.Tensor, ...]]] = {}

    class Platform:
        """vLLM's, as far as graph pools go: it hands out one for all graphs, unless another is put in its place."""

        _global_graph_pool: object = None
        graph_pool_handle = staticmethod(object)

        def get_global_graph_pool(self) -> object:
            Platform._global_graph_pool = Platform._global_graph_pool or object()
            return Platform._global_graph_pool

    def capture(self: Any, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
        for desc in self._capture_descs.get(CUDAGraphMode.PIECEWISE, []):
            forward = create_forward_fn(desc, warmup=True)
            forward(CUDAGraphMode.NONE)
            forward(CUDAGraphMode.PIECEWISE)
            seen.sizes.append(desc.num_tokens)
        for desc in self._capture_descs.get(CUDAGraphMode.FULL, []):
            create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
            self.graphs[desc] = create_forward_fn(desc, warmup=False)
            self.graphs[desc](CUDAGraphMode.NONE)
            seen.captured.append((desc.num_reqs, desc.uniform_token_count))
        self._graphs_captured = True

    def run_fullgraph(self: Any, desc: Any) -> None:
        assert self.pool is Platform._global_graph_pool, "a graph of the pool that vLLM has thrown away"
        seen.replayed[desc.num_reqs, desc.uniform_token_count] += 1
        self.graphs[desc](CUDAGraphMode.NONE)

    def run_pw_graph(self: Any, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        rows = get_forward_context().batch_descriptor.num_tokens
        seen.pieces[rows] += 1
        stands = [(x.data_ptr(), x.shape) for x in inputs.values() if x is not None]
        outputs = model(**inputs)
        if rows not in captured:
            captured[rows] = stands, outputs
            return outputs
        assert captured[rows][0] == stands, "a graph reads its inputs where they stood when it was captured"
        for kept, new in zip(captured[rows][1], outputs, strict=True):
            kept.copy_(new)
        return captured[rows][1]

    patches.enter_context(patch.object(cudagraph_utils, "current_platform", Platform()))
    patches.enter_context(patch.object(cudagraph_utils.CUDAGraphWrapper, "clear_all_graphs", captured.clear))
    patches.enter_context(patch.object(speculator, "has_compiled_submodule", lambda model: True))
    for method in (capture, run_fullgraph, run_pw_graph):
        patches.enter_context(patch.object(cudagraph_utils.CudaGraphManager, method.__name__, method))


def _backend_with_graphs(patches: ExitStack, in_place: bool) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    build = Builder.build

    def update_draft_decode_metadata(self: Any, metadata: Any) -> None:
        given = {"num_reqs": len(metadata.seq_lens), "block_table_tensor": metadata.block_table} | vars(metadata)
        metadata.scheduler_metadata = build(self, 0, SimpleNamespace(**given)).scheduler_metadata

    def shape(common: Any) -> tuple[int, int]:
        return common.num_reqs, common.num_actual_tokens

    def build_for_cudagraph_capture(self: Any, common: Any) -> Any:
        kept[id(self), *shape(common)] = build(self, 0, common)
        return kept[id(self), *shape(common)]

    def build_again(self: Any, common_prefix_len: int, common: Any, **kwargs: Any) -> Any:
        metadata = build(self, common_prefix_len, common, **kwargs)
        captured = kept.get((id(self), *shape(common)), metadata)
        captured.scheduler_metadata = metadata.scheduler_metadata  # what a backend keeps in a buffer of its own
        return metadata

    kept: dict[tuple[int, ...], Any] = {}
    patches.enter_context(patch.object(Builder, "_cudagraph_support", AttentionCGSupport.UNIFORM_BATCH))
    if in_place:
        update = update_draft_decode_metadata
        patches.enter_context(patch.object(Builder, "supports_draft_decode_metadata_update", True))
        patches.enter_context(patch.object(Builder, update.__name__, update, create=True))
    else:
        patches.enter_context(patch.object(Builder, "build", build_again))
        patches.enter_context(patch.object(Builder, "build_for_cudagraph_capture", build_for_cudagraph_capture))


def _give_kernel_block_tables(drafter: Any) -> None:
    """Tables of the backend's own, whose blocks are as large as the manager's: equal numbers, another tensor."""
    for groups in drafter.attn_groups:
        for group in groups:
            table = drafter.block_tables.input_block_tables[group.kv_cache_group_id]
            group.kernel_block_size = group.kv_cache_spec.block_size
            group.kernel_block_table = torch.zeros(1, *table.shape, dtype=torch.int32)
            group.kernel_block_offsets = torch.zeros(1, dtype=torch.int32)


def _note_steps(patches: ExitStack, drafter: Any, seen: Seen) -> None:
    """Count what ``prepare_inputs`` fills, and poison before it all that a step has to write.

    The poison is values that a lookup survives. Temperatures and seeds belong to requests, also to those not in this
    batch; the starts of a ragged batch are an input.
    """
    from peagle_vllm.v2 import speculator

    prepare_inputs, first_rows = speculator.prepare_inputs, speculator.first_rows

    def noting_prepare(target: Any, aux: Any, groups: Any, batch: Any, out: Any, **constants: int) -> None:
        for buffer in (drafter.hidden_states, drafter.fc_inputs):
            buffer.fill_(float("nan"))
        drafter.draft_tokens.fill_(-1)
        poison = {"input_ids": 3, "positions": 5, "row_map": 0, "slot_mappings": 32, "seq_lens": 1}
        poison |= {"sample_indices": 0, "sample_pos": 1, "sample_idx_mapping": 0}
        if batch.static_length:
            poison["query_start_loc"] = 0
        for name, value in poison.items():
            getattr(drafter.buffers, name).fill_(value)
        prepare_inputs(target, aux, groups, batch, out, **constants)
        seen.steps += 1
        if batch.static_length:
            seen.padded += batch.num_reqs_padded > batch.num_reqs
            num_query = target.query_start_loc[: batch.num_reqs + 1].diff()
            seen.unequal += bool((num_query != num_query[0]).any())
            seen.depths[batch.num_speculative_tokens] += 1

    def poisoned_first_rows(buffer: torch.Tensor, num_rows: int) -> torch.Tensor:
        rows = first_rows(buffer, num_rows)
        return rows if num_rows <= len(buffer) else rows.fill_(float("nan"))

    patches.enter_context(patch.object(speculator, "prepare_inputs", noting_prepare))
    patches.enter_context(patch.object(speculator, "first_rows", poisoned_first_rows))
