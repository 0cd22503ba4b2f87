"""Host time of a draft step on V2, P-EAGLE's against EAGLE-3's: ``python -m benchmarks.host_time [--out FILE]``.

Times ``propose()`` of both live speculators on the tiny models, in turns in one process and on decode batches of equal
shape, with all taken away that is a GPU's work: Triton launches and graph replays do nothing (``stand_ins``), both
find FULL graphs for every batch. Needs no GPU, and says nothing about one's time.

Outside its graphs EAGLE-3 concatenates and projects the captured hidden states and copies inputs. A GPU's host only
launches that, a CPU computes it. So it is timed twice: as it is, and with hidden states one element wide, where little
but PyTorch's dispatch is left. The ratio is of the latter; a launch on a GPU costs several times a dispatch.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import arms
from peagle_vllm.provenance import provenance

K = 7
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "P-EAGLE": ("tiny-llama-peagle", {"parallel_drafting": True}),
    "EAGLE-3": ("tiny-llama-eagle3", {}),
}
BATCHES = (1, 8, 64, 256)
AIM = 0.6
CALLS = 20  # of one speculator before the other's turn
Calls = dict[int, dict[str, Any]]  # by batch size: propose's arguments


def speculator(name: str, batches: list[int]) -> tuple[Any, Calls]:
    """A speculator with graphs that do nothing, and its arguments. Its engine is gone, the next one can start."""
    from benchmarks.stand_ins import decode_batch, give_graphs

    head, more = HEADS[name]
    most = max(batches)
    llm = arms.tiny_llm(most, 2 * K * most, head, {"num_speculative_tokens": K} | more)
    runner, drafter = arms.inside(llm)
    give_graphs(drafter, batches, K)
    calls = {batch: decode_batch(runner, batch, K) for batch in batches}
    llm.llm_engine.engine_core.shutdown()
    return drafter, calls


def one_element_wide(drafter: Any, calls: Calls) -> None:
    """Take the work out of EAGLE-3's eager operations on hidden states, and leave the operations."""
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    fc = drafter.model.model.fc
    fc.weight = torch.nn.Parameter(torch.ones(1, 3), requires_grad=False)
    fc.quant_method._gemm_impl = default_unquantized_gemm  # what a GPU runs; a CPU's reads packed weights
    drafter.hidden_states = drafter.hidden_states[:, :1].contiguous()
    for arguments in calls.values():
        arguments["aux_hidden_states"] = [h[:, :1].contiguous() for h in arguments["aux_hidden_states"]]


def timed(both: dict[str, tuple[Any, Calls]], batches: list[int], rounds: int) -> dict[int, dict[str, Any]]:
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


def replays(drafter: Any, arguments: dict[str, Any]) -> int:
    """Graph replays of one call."""
    from benchmarks.stand_ins import Graph

    before = Graph.replays
    drafter.propose(**arguments)
    return Graph.replays - before


def measure(batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Every batch size, in this process."""
    from benchmarks.stand_ins import no_launches

    arms.prepare_process()
    both = {name: speculator(name, batches) for name in HEADS}
    with no_launches():
        computed = timed(both, batches, rounds)
        one_element_wide(*both["EAGLE-3"])
        cells = []
        for batch, us in timed(both, batches, rounds).items():
            ratio = us["P-EAGLE"]["median"] / us["EAGLE-3"]["median"]
            us["EAGLE-3, computed"] = computed[batch]["EAGLE-3"]
            seen = {name: replays(drafter, calls[batch]) for name, (drafter, calls) in both.items()}
            cells.append({"batch": batch, "us": us, "replays": seen, "ratio": ratio, "aim": AIM, "met": ratio <= AIM})
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=50, help="turns of each speculator, of 20 calls")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, which fits it
    args = parser.parse_args()
    if args.here:
        arms.hand_over(measure(args.batch, args.rounds))
        return
    here = ["--here", "--rounds", str(args.rounds), "--batch", *map(str, args.batch)]
    cells = arms.run("benchmarks.host_time", here, arms.V2 | {"TRITON_INTERPRET": "1"})
    for cell in cells:
        times = ", ".join(f"{name} {us['median']:.1f} us" for name, us in cell["us"].items())
        print(f"batch {cell['batch']:3}: {times}; {cell['ratio']:.2f}, aim {AIM}: {'met' if cell['met'] else 'missed'}")
    arms.write_result(args.out, __doc__, {"k": K, "rounds": args.rounds, **provenance(), "cells": cells})


if __name__ == "__main__":
    main()
