"""What drafting takes of a GPU's memory at three servers' settings: ``python -m benchmarks.memory [--out FILE]``.

Arithmetic, no measurement: gpt-oss-20b's published shapes (benchmarks/shapes.py), bfloat16, and the captured shapes of
``peagle_vllm.v2.cudagraph``. ``before``: every buffer as large as the largest batch there can be.
"""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import shapes
from benchmarks.arms import write_result
from peagle_vllm.provenance import provenance

K, AUX = 7, len(shapes.AUX_LAYERS)
# name -> max_num_seqs, max_num_batched_tokens, max_cudagraph_capture_size: vLLM's defaults of `vllm serve`, and the
# published command's.
SERVERS = {
    "vLLM's defaults on an H200": (1024, 8192, 512),
    "vLLM's defaults on a B200": (1024, 16_384, 1024),
    "the published command": (1024, 100_000, 4096),
}


def config(max_num_seqs: int, max_num_batched_tokens: int, capture: int) -> Any:
    """The part of a VllmConfig that the rule reads."""
    from vllm.config.compilation import CUDAGraphMode

    spec = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: False,
        enable_adaptive_verification=False,
        draft_model_config=SimpleNamespace(
            get_hidden_size=lambda: shapes.HIDDEN,
            get_vocab_size=lambda: shapes.VOCAB,
            hf_config=SimpleNamespace(
                draft_vocab_size=shapes.VOCAB, eagle_aux_hidden_state_layer_ids=shapes.AUX_LAYERS
            ),
        ),
    )
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, capture + 1, 16)]  # vLLM's steps
    return SimpleNamespace(
        num_speculative_tokens=K,
        speculative_config=spec,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
        ),
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_hidden_size=lambda: shapes.HIDDEN),
    )


def row(name: str, server: tuple[int, int, int]) -> dict[str, Any]:
    from peagle_vllm.v2.memory import draft_memory

    memory = draft_memory(config(*server))
    max_num_seqs, tokens, _ = server
    before = (1 + max_num_seqs * (K + 1)) * AUX + tokens + max_num_seqs * (K - 1)  # rows of HIDDEN
    return {
        "server": name,
        **dict(zip(("max_num_seqs", "max_num_batched_tokens", "max_cudagraph_capture_size"), server, strict=True)),
        "full_graphs": len(memory.graphs.decode),
        "full_graph_requests": memory.graphs.max_num_reqs,
        "piecewise_graphs": len(memory.graphs.mixed),
        "piecewise_rows": memory.graphs.mixed[-1],
        "buffers_bytes": memory.buffers,
        "before_bytes": before * shapes.HIDDEN * torch.bfloat16.itemsize + memory.indices,
        "largest_step_bytes": memory.largest_step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = [row(name, server) for name, server in SERVERS.items()]
    for r in rows:
        print(
            f"{r['server']}: buffers {r['buffers_bytes'] / 1e6:.0f} MB (before {r['before_bytes'] / 1e6:.0f}), "
            f"{r['full_graphs']} full graphs up to {r['full_graph_requests']} requests, {r['piecewise_graphs']} "
            f"piecewise up to {r['piecewise_rows']} rows; largest step {r['largest_step_bytes'] / 1e6:.0f} MB"
        )
    write_result(out, __doc__, {"k": K, "servers": rows, **provenance()})


if __name__ == "__main__":
    main()
