"""Which graphs serve draft steps under real traffic: ``python -m benchmarks.traffic [--out FILE]``. Needs no GPU.

vLLM's own scheduler without a model: each draft is accepted at random, so that a step gives AL tokens a request.
Requests arrive by a Poisson process of c x AL / OUTPUT a step, which keeps c in flight as long as vLLM's token budget
holds them; the unit of time is a step, whatever it would take. For each step the product's own rule
(``DraftGraphs.dispatch``) says how the batch drafts. ``before``: the rule until graphs followed the draft's own
batches, no graph with a prefill in the batch or above ``max_cudagraph_capture_size / (K + 1)`` requests.
"""

import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arms
from benchmarks.arms import Published
from benchmarks.shapes import HEADS, TARGETS, write_config
from peagle_tools.shared.provenance import provenance

K, AL, OUTPUT = 7, 3.0, 1024
PROMPTS = (1, 1023)  # tokens, every length alike
BLOCK_SIZE, MAX_MODEL_LEN = 16, 4096
WARM = 512  # steps, one and a half times a request's life
PEAK_FLOPS = {"H200": 989e12, "B200": 2250e12}  # dense bfloat16, as published
KINDS = ("with a prefill", "FULL", "PIECEWISE", "eager", "eager before")


@dataclass(frozen=True)
class Server:
    """What bounds its batches."""

    max_num_batched_tokens: int
    max_cudagraph_capture_size: int
    max_num_seqs: int = 1024


SERVERS = {
    "H200": Server(8192, 512),  # vLLM's defaults of `vllm serve` there
    "H200-256": Server(8192, 512, max_num_seqs=256),
    "B200": Server(16_384, 1024),  # the defaults
}
CASES = ("H200:8", "H200:64", "H200:1024", "H200-256:256", "B200:1024")


def config(server: Server) -> Any:
    """The VllmConfig of this server, on any machine: gpt-oss-20b's width, no weights."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        speculative = {
            "method": "eagle3",
            "model": write_config(Path(folder) / "head", HEADS["gpt-oss-20b"].config(parallel=True)),
            "num_speculative_tokens": K,
            "parallel_drafting": True,
        }
        made = EngineArgs(
            model=write_config(Path(folder) / "target", TARGETS["dense"]),
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=server.max_num_seqs,
            max_num_batched_tokens=server.max_num_batched_tokens,
            enable_prefix_caching=False,
            speculative_config=speculative,
        ).create_engine_config()
    # What vLLM turns off where it finds a CPU.
    made.scheduler_config.async_scheduling = True
    compilation = made.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = None
    compilation.max_cudagraph_capture_size = server.max_cudagraph_capture_size
    made._set_cudagraph_sizes()
    return made


def scheduler(vllm_config: Any) -> Any:
    """vLLM's scheduler, with KV blocks for every request, so that none is preempted."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    blocks = vllm_config.scheduler_config.max_num_seqs * MAX_MODEL_LEN // BLOCK_SIZE
    vllm_config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
    return vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
    )


def acceptance_rate(length: float, k: int) -> float:
    """The rate of each of k drafts, given the one before, at which 1 + accepted is ``length`` on average."""
    roots = np.roots([1.0] * k + [1 - length])  # of rate + rate^2 + ... + rate^k = length - 1
    return float(max(root.real for root in roots if abs(root.imag) < 1e-9))


def steps(vllm_config: Any, requests_a_step: float, count: int, seed: int) -> Iterator[np.ndarray]:
    """[num_reqs] int32 rows that each request verifies, of ``count`` steps with a request in them.

    As vLLM's engine does under asynchronous scheduling, a step is scheduled before the last one's tokens are known.
    """
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    engine, random, arrived = scheduler(vllm_config), np.random.default_rng(seed), 0
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    rate, running = acceptance_rate(AL, K), deque[tuple[Any, Any]]()
    while count:
        for _ in range(random.poisson(requests_a_step)):
            prompt = [0] * int(random.integers(PROMPTS[0], PROMPTS[1] + 1))
            engine.add_request(Request(str(arrived), prompt, params, None))
            arrived += 1
        scheduled = engine.schedule()
        if scheduled.num_scheduled_tokens:
            ids, sampled = list(scheduled.num_scheduled_tokens), []
            for req in ids:
                drafts = len(scheduled.scheduled_spec_decode_tokens.get(req, ()))
                accepted = min(int(random.geometric(1 - rate)) - 1, drafts)
                sampled.append([] if engine.requests[req].is_prefill_chunk else [0] * (1 + accepted))
            output = ModelRunnerOutput(ids, {req: i for i, req in enumerate(ids)}, sampled)
            running.append((scheduled, output))
            count -= 1
            yield np.array(list(scheduled.num_scheduled_tokens.values()), dtype=np.int32)
        if running and (len(running) > 1 or not scheduled.num_scheduled_tokens):
            engine.update_from_output(*running.popleft())


def flop_per_row() -> int:
    """Of gpt-oss-20b's P-EAGLE head, its lm_head and attention scores apart."""
    weights = HEADS["gpt-oss-20b"].weights(parallel=True)
    return 2 * (weights["fc"] + weights["layers"])


def simulate(name: str, c: int, count: int, warm: int = WARM, seed: int = 0) -> dict[str, Any]:
    """``count`` steps of a server with c requests in flight, after ``warm`` that do not count."""
    from peagle_vllm.v2.cudagraph import draft_graphs

    server = SERVERS[name]
    vllm_config = config(server)
    graphs = draft_graphs(vllm_config, vllm_config.compilation_config.cudagraph_mode)
    limits = {"max_k": K, "max_num_tokens": server.max_num_batched_tokens, "max_model_len": MAX_MODEL_LEN}
    kinds, reasons, rows = Counter[str](), Counter[str](), Counter[str]()
    batches = list(steps(vllm_config, c * AL / OUTPUT, warm + count, seed))
    for scheduled in batches[warm:]:
        batch, starts, graph = graphs.dispatch(scheduled, int(scheduled.sum()), K, **limits)
        has_prefill = bool(scheduled.max() > K + 1)
        kinds[graph.cg_mode.name if graph else "eager"] += 1
        kinds["with a prefill"] += has_prefill
        kinds["eager before"] += has_prefill or len(scheduled) > server.max_cudagraph_capture_size // (K + 1)
        if graph is None:
            kind, missing = ("a prefill", "piecewise") if has_prefill else ("decodes", "full")
            reasons[f"{kind} of more rows than the largest {missing} graph"] += 1
        rows["own"] += int(starts[-1])
        rows["computed"] += batch.num_rows
    return {
        "server": name,
        **asdict(server),
        "c": c,
        "steps": count,
        "requests_a_step": sum(map(len, batches[warm:])) / count,
        "largest_full_graph_requests": graphs.max_num_reqs,
        "largest_piecewise_graph_rows": graphs.mixed[-1],
        # The least that a batch beyond it keeps the device: the arithmetic of gpt-oss-20b's head.
        "beyond_it_ms": 1e3 * graphs.mixed[-1] * flop_per_row() / PEAK_FLOPS[name.split("-")[0]],
        "share": {kind: kinds[kind] / count for kind in KINDS},
        "eager_reasons": dict(reasons),
        "padding": 1 - rows["own"] / rows["computed"],
    }


def simulate_cases(cases: list[str], count: int, warm: int) -> list[dict[str, Any]]:
    """Each "SERVER:C", in this process."""
    from benchmarks.engines import prepare_process

    prepare_process()
    return [simulate(name, int(c), count, warm) for name, c in (case.split(":") for case in cases)]


def published(result: dict[str, Any]) -> Published:
    """The table, and why steps remain eager."""
    rows, remains = [], []
    for case in result["cases"]:
        where = f"{case['server']}, {case['c']:,}"
        shares = (f"{share:.1%}" for share in case["share"].values())
        rows.append((where, f"{case['requests_a_step']:.0f}", *shares, f"{case['padding']:.1%}"))
        for reason, count in case["eager_reasons"].items():
            largest, ms = case["largest_piecewise_graph_rows"], case["beyond_it_ms"]
            remains.append(
                f"{where}: {count} of {case['steps']:,} steps, {reason} ({largest:,} rows), which keeps the device for "
                f"{ms:.1f} ms at least"
            )
    shown = ("steps with a prefill", "full graph", "piecewise", "eager", "eager before")  # KINDS
    low, high = result["prompt_tokens"]
    notes = f"What remains eager: {'; '.join(remains) or 'nothing'}.\n\n"
    notes += f"K = {result['k']}, AL {result['acceptance_length']:.0f}, "
    notes += f"prompts of {low:,} to {high:,} tokens, {result['output_tokens']:,} output tokens"
    return ("server, c", "requests a step", *shown, "padding rows"), rows, notes


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--steps", type=int, default=4096, help="of each case, after the first ones that do not count")
    parser.add_argument("--warm", type=int, default=WARM, help="steps that do not count")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="SERVER:C")
    args = parser.parse_args()
    cases = arms.run(simulate_cases, arms.INTERPRETED_V2, cases=list(args.cases), count=args.steps, warm=args.warm)
    report = {"k": K, "acceptance_length": AL, "prompt_tokens": PROMPTS, "output_tokens": OUTPUT, "warm": args.warm}
    report |= provenance() | {"cases": cases}
    print(arms.table(*published(report)))
    arms.write_result(args.out, __doc__, report)


if __name__ == "__main__":
    main()
