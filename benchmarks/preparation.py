"""V1's draft preparation on a CPU, stock against plugin: ``python -m benchmarks.preparation [--out FILE]``.

Times ``set_inputs_first_pass``, which builds the draft batch from the target's, in decode steps of a live engine on
the tiny models. Each arm runs in a process of its own, and the arms take turns, so that a drift of the machine's
speed meets them alike.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import arms
from benchmarks.arms import STOCK, V1
from peagle_vllm.provenance import provenance

K = 5
ARMS = {"stock V1": V1 | STOCK, "plugin V1": V1}


def run_arm(batch: int) -> list[float]:
    """Seconds of each decode step's preparation, in this process."""
    arms.prepare_process()
    from vllm import SamplingParams, TokensPrompt

    llm = arms.tiny_llm(batch, 2048, "tiny-llama-peagle", {"num_speculative_tokens": K, "parallel_drafting": True})
    _, drafter = arms.inside(llm)
    original, seconds = drafter.set_inputs_first_pass, []

    def timed(**kwargs: Any) -> Any:
        began = time.perf_counter()
        out = original(**kwargs)
        took = time.perf_counter() - began
        cad = kwargs["cad"]
        if cad.batch_size() == batch and cad.max_query_len <= K + 1:
            seconds.append(took)
        return out

    drafter.set_inputs_first_pass = timed
    prompts = [TokensPrompt(prompt_token_ids=[17 + i % 200, 40, 41, 42, 43]) for i in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, detokenize=False)
    for _ in range(3):
        llm.generate(prompts, params, use_tqdm=False)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--rounds", type=int, default=2, help="how often each arm runs")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)  # this one, in this process
    args = parser.parse_args()
    if args.arm:
        arms.hand_over(run_arm(*args.batch))
        return
    cells = []
    for batch in args.batch:
        samples: dict[str, list[float]] = {name: [] for name in ARMS}
        for _ in range(args.rounds):
            for name, env in ARMS.items():
                arguments = ["--arm", name, "--batch", str(batch)]
                samples[name] += arms.run("benchmarks.preparation", arguments, env)
        median = {name: statistics.median(values) * 1e6 for name, values in samples.items()}
        ratio = median["stock V1"] / median["plugin V1"]
        print(
            f"batch {batch:3}: stock {median['stock V1']:6.0f} us, plugin {median['plugin V1']:6.0f} us, {ratio:.2f}x"
        )
        microseconds = {name: [round(s * 1e6, 1) for s in values] for name, values in samples.items()}
        cells.append({"batch": batch, "median_us": median, "stock_over_plugin": ratio, "samples_us": microseconds})
    arms.write_result(args.out, __doc__, {"k": K, "rounds": args.rounds, **provenance(), "cells": cells})


if __name__ == "__main__":
    main()
