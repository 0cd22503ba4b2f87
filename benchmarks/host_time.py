"""Host time of a draft step on V2, P-EAGLE's against EAGLE-3's: ``python -m benchmarks.host_time [--out FILE]``.

Times ``propose()`` of both live speculators on the tiny models, in turns in one process and on decode batches of equal
shape, without a GPU's share of the work: Triton launches and graph replays do nothing (``stand_ins``), and both find
FULL graphs for every batch. Needs no GPU, and measures none of a GPU's time.

Outside its graphs EAGLE-3 concatenates and projects the captured hidden states and copies inputs. A GPU's host only
launches that, a CPU computes it. So it is timed twice: as it is, and with hidden states one element wide, where little
but PyTorch's dispatch is left. The ratio is of the latter; a launch on a GPU costs several times a dispatch.
"""

import statistics
import time
from typing import Any

from benchmarks import arms
from benchmarks.arms import Published
from benchmarks.engines import inside, tiny_llm
from benchmarks.stand_ins import Graph, decode_batch, give_graphs, no_launches
from peagle_tools.shared.provenance import provenance

K = 7
HEADS = {"P-EAGLE": "tiny-llama-peagle", "EAGLE-3": "tiny-llama-eagle3"}
BATCHES = (1, 8, 64, 256)
AIM = 0.6
CALLS = 20  # of one speculator before the other's turn
Calls = dict[int, dict[str, Any]]  # by batch size: propose's arguments


def speculator(head: str, batches: list[int]) -> tuple[Any, Calls]:
    """A speculator with graphs that do nothing, and its arguments. Its engine is shut down: the next one can start."""
    llm = tiny_llm(head, K, max(batches), 2 * K * max(batches))
    runner, drafter = inside(llm)
    give_graphs(drafter, batches, K)
    calls = {batch: decode_batch(runner, batch, K) for batch in batches}
    llm.llm_engine.engine_core.shutdown()
    return drafter, calls


def narrow_to_one_element(drafter: Any, calls: Calls) -> None:
    """Take the work out of EAGLE-3's eager operations on hidden states, and leave the operations."""
    from torch import nn, ones
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    fc = drafter.model.model.fc
    fc.weight = nn.Parameter(ones(1, 3), requires_grad=False)
    fc.quant_method._gemm_impl = default_unquantized_gemm  # what a GPU runs; a CPU's reads packed weights
    drafter.hidden_states = drafter.hidden_states[:, :1].contiguous()
    for arguments in calls.values():
        arguments["aux_hidden_states"] = [h[:, :1].contiguous() for h in arguments["aux_hidden_states"]]


def times(both: dict[str, tuple[Any, Calls]], batches: list[int], rounds: int) -> dict[int, dict[str, Any]]:
    """``arms.summary`` by batch size and speculator; a sample is the median of CALLS calls, in microseconds."""
    samples: dict[int, dict[str, list[float]]] = {batch: {name: [] for name in both} for batch in batches}
    for _ in range(rounds):
        for batch in batches:
            for name, (drafter, calls) in both.items():
                seconds = []
                for _ in range(CALLS):
                    began = time.perf_counter()
                    drafter.propose(**calls[batch])
                    seconds.append(time.perf_counter() - began)
                samples[batch][name].append(statistics.median(seconds) * 1e6)
    return {batch: {name: arms.summary(own) for name, own in by.items()} for batch, by in samples.items()}


def measure(batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Every batch size, in this process."""
    both = {name: speculator(head, batches) for name, head in HEADS.items()}
    with no_launches():
        computed = times(both, batches, rounds)
        narrow_to_one_element(*both["EAGLE-3"])
        cells = []
        for batch, us in times(both, batches, rounds).items():
            ratio = us["P-EAGLE"]["median"] / us["EAGLE-3"]["median"]
            us["EAGLE-3, computed"] = computed[batch]["EAGLE-3"]
            replays = {}
            for name, (drafter, calls) in both.items():
                before = Graph.replays
                drafter.propose(**calls[batch])
                replays[name] = Graph.replays - before
            found = {"batch": batch, "us": us, "replays": replays}
            cells.append(found | {"ratio": ratio, "aim": AIM, "met": ratio <= AIM})
    return cells


def published(result: dict[str, Any]) -> Published:
    """The table, and whether the aim was met."""

    def spread(us: dict[str, Any]) -> str:
        return f"{us['median']:.1f} ({us['p10']:.1f} to {us['p90']:.1f})"

    rows = []
    for cell in result["cells"]:
        ours, eagle3, computed = (cell["us"][name] for name in ("P-EAGLE", "EAGLE-3", "EAGLE-3, computed"))
        rows.append((cell["batch"], spread(ours), spread(eagle3), f"{cell['ratio']:.2f}", f"{computed['median']:.0f}"))
    met = arms.verdict(all(cell["met"] for cell in result["cells"]))
    notes = f"Medians of {result['rounds']} turns, 10th and 90th percentile in brackets. Aim: {AIM}, {met}."
    columns = ("batch", "P-EAGLE, us", "EAGLE-3, us", "P-EAGLE / EAGLE-3", "EAGLE-3 with its work, us")
    return columns, rows, f"{notes}\n\nK = {result['k']}"


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=50, help=f"turns of each speculator, of {CALLS} calls")
    args = parser.parse_args()
    cells = arms.run(measure, arms.INTERPRETED_V2, batches=args.batch, rounds=args.rounds)
    report = {"k": K, "rounds": args.rounds, **provenance(), "cells": cells}
    print(arms.table(*published(report)))
    arms.write_result(args.out, __doc__, report)


if __name__ == "__main__":
    main()
