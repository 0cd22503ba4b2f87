"""A CUDA graph on a CPU: what capture would have recorded, run again.

``emulate`` gives a live V2 engine the product's own graph manager, with two things replaced. Capture keeps the
function that vLLM would record, made once for each shape; replay calls it again. So, as in a graph, every Python
number and every tensor address of the product is the one of capture time, and only the contents of the persistent
buffers are new. And where a GPU's attention backend refreshes its metadata from those buffers by itself, the CPU's is
built anew: what a backend freezes in it, only a GPU can show.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.engines import Engine


@dataclass
class Seen:
    """What was captured and replayed.

    Attributes:
        captured: (requests, rows a request).
        replayed: how often each captured shape served a batch.
        padded: replays with more requests than the batch had.
        unequal: replays of batches whose requests verified different numbers of rows.
        depths: K of each replay.
        eager: draft batches that no graph served.
    """

    captured: list[tuple[int, int]] = field(default_factory=list)
    replayed: Counter[tuple[int, int]] = field(default_factory=Counter)
    padded: int = 0
    unequal: int = 0
    depths: Counter[int] = field(default_factory=Counter)
    eager: int = 0


@contextmanager
def emulate(engine: Engine, request_counts: list[int]) -> Iterator[Seen]:
    """Serve decode batches from "graphs" of these request counts, until the end of the block."""
    from vllm.config.compilation import CUDAGraphMode

    from peagle_vllm.v2 import cudagraph, speculator

    drafter, seen = engine.drafter, Seen()
    config = copy.copy(drafter.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    num_query = 1 + config.num_speculative_tokens
    config.compilation_config.cudagraph_capture_sizes = sorted(
        {*request_counts, *(n * num_query for n in request_counts)}
    )
    config.compilation_config.max_cudagraph_capture_size = max(request_counts) * num_query

    class Manager(cudagraph.DraftCudaGraphManager):
        def capture(self, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
            for desc in self._capture_descs[CUDAGraphMode.FULL]:
                create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
                self.graphs[desc] = create_forward_fn(desc, warmup=False)
                self.graphs[desc](CUDAGraphMode.NONE)
                seen.captured.append((desc.num_reqs, desc.uniform_token_count))
            self._graphs_captured = True

        def run_fullgraph(self, desc: Any) -> None:
            seen.replayed[desc.num_reqs, desc.uniform_token_count] += 1
            self.graphs[desc](CUDAGraphMode.NONE)

    def refresh(attn_metadata: dict[str, Any], num_reqs: int) -> None:
        starts = drafter.buffers.query_start_loc[: num_reqs + 1].numpy().astype(np.int32)
        tables = tuple(table[:num_reqs] for table in drafter.block_tables.input_block_tables)
        anew = drafter._attn_metadata(num_reqs, starts, tables)
        for layer, metadata in attn_metadata.items():
            vars(metadata).update(vars(anew[layer]))

    expand = speculator.expand

    def noting_expand(target: Any, aux: Any, groups: Any, layout: Any, step: Any, out: Any) -> None:
        # What a step leaves unwritten must not be read: all that it writes is poisoned first, with values that a
        # lookup survives. Temperatures and seeds belong to requests, also to those not in this batch.
        drafter.hidden_states.fill_(float("nan"))
        drafter.staging.fill_(float("nan"))
        drafter.draft_tokens.fill_(-1)
        if layout.static_length:
            poison = {"input_ids": 3, "positions": 5, "row_map": 0, "slot_mappings": 32, "seq_lens": 1}
            poison |= {"sample_indices": 0, "sample_positions": 1, "sample_req": 0, "query_start_loc": 0}
            for name, value in poison.items():
                getattr(drafter.buffers, name).fill_(value)
        expand(target, aux, groups, layout, step, out)
        if layout.static_length:
            seen.padded += layout.num_reqs_padded > target.num_reqs
            num_query = target.query_start_loc[: target.num_reqs + 1].diff()
            seen.unequal += bool((num_query != num_query[0]).any())
            seen.depths[step.num_speculative_tokens] += 1
        else:
            seen.eager += 1

    # The pool of a platform without graphs is never asked for.
    manager = Manager(config, drafter.device, CUDAGraphMode.NONE)
    manager.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    manager._init_candidates()
    drafter.cudagraph_manager, drafter._update_draft_decode_metadata = manager, refresh
    speculator.expand = noting_expand
    try:
        with torch.inference_mode():
            drafter.capture()
        yield seen
    finally:
        speculator.expand = expand
        drafter.cudagraph_manager = None
        del drafter._update_draft_decode_metadata
