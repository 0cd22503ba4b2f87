"""What drafting takes of a GPU's memory at three servers' settings: ``python -m benchmarks.memory [--out FILE]``.

Arithmetic, no measurement: gpt-oss-20b's published shapes (benchmarks/shapes.py), bfloat16, and the captured shapes of
``peagle_vllm.v2.cudagraph``. ``before``: every buffer as large as the largest batch there can be.
"""

from dataclasses import asdict
from typing import Any

from benchmarks import arms
from benchmarks.arms import Published
from benchmarks.shapes import GPT_OSS, NUM_AUX
from benchmarks.traffic import SERVERS, K, Server, config
from peagle_vllm.provenance import provenance

# The published command's settings, beside vLLM's defaults of `vllm serve`.
ROWS = {
    "vLLM's defaults on an H200": SERVERS["H200"],
    "vLLM's defaults on a B200": SERVERS["B200"],
    "the published command": Server(100_000, 4096),
}


def row(name: str, server: Server) -> dict[str, Any]:
    from peagle_vllm.v2.memory import draft_memory

    vllm_config = config(server)
    memory = draft_memory(vllm_config)
    tokens, max_num_seqs = server.max_num_batched_tokens, server.max_num_seqs
    before = (1 + max_num_seqs * (K + 1)) * NUM_AUX + tokens + max_num_seqs * (K - 1)  # rows of hidden states
    return {
        "server": name,
        **asdict(server),
        **memory.sizes,
        "before_bytes": before * GPT_OSS.hidden * vllm_config.model_config.dtype.itemsize + memory.indices,
    }


def compute() -> list[dict[str, Any]]:
    """Every server, in this process."""
    from benchmarks.engines import prepare_process

    prepare_process()
    return [row(name, server) for name, server in ROWS.items()]


def published(result: dict[str, Any]) -> Published:
    """The table."""
    rows = []
    for server in result["servers"]:
        full = f"{server['full_graphs']}, up to {server['full_graph_requests']:,} requests"
        piecewise = f"{server['piecewise_graphs']}, up to {server['piecewise_rows']:,} rows"
        keys = ("head_weights_bytes", "buffers_bytes", "before_bytes", "largest_step_bytes")
        weights, *sizes = (f"{server[key] / 1e6:,.0f}" for key in keys)
        head = weights, f"{server['head_kv_bytes_per_token']:,}"
        rows.append((server["server"], *head, full, piecewise, *sizes))
    columns = ("server", "head, MB", "its KV, bytes a token", "full graphs", "piecewise graphs")
    columns += ("buffers, MB", "before, MB", "largest step, MB")
    return columns, rows, f"K = {result['k']}; computed, not measured"


def main() -> None:
    out = arms.parser(__doc__).parse_args().out
    report = {"k": K, "servers": arms.run(compute, arms.INTERPRETED_V2), **provenance()}
    print(arms.table(*published(report)))
    arms.write_result(out, __doc__, report)


if __name__ == "__main__":
    main()
