"""V1's draft preparation on a CPU, stock against plugin: ``python -m benchmarks.preparation [--out FILE]``.

Times ``set_inputs_first_pass``, which builds the draft batch from the target's, in decode steps of a live engine on
the tiny models. Each arm runs in a process of its own, and the arms take turns, so that a drift of the machine's
speed meets them alike.
"""

import statistics
import time
from typing import Any

from benchmarks import arms
from benchmarks.arms import STOCK, V1, Published
from benchmarks.engines import generate, inside, tiny_llm
from peagle_tools.shared.provenance import provenance

K = 5
ARMS = {"stock V1": V1 | STOCK, "plugin V1": V1}


def run_arm(batch: int) -> list[float]:
    """Microseconds of each decode step's preparation, in this process."""
    llm = tiny_llm("tiny-llama-peagle", K, batch, 2048)
    _, drafter = inside(llm)
    original, us = drafter.set_inputs_first_pass, []

    def timed(**kwargs: Any) -> Any:
        began = time.perf_counter()
        out = original(**kwargs)
        took = time.perf_counter() - began
        cad = kwargs["cad"]
        if cad.batch_size() == batch and cad.max_query_len <= K + 1:
            us.append(took * 1e6)
        return out

    drafter.set_inputs_first_pass = timed
    for _ in range(3):
        generate(llm, batch, 5, 100)
    return us


def published(result: dict[str, Any]) -> Published:
    """The table."""
    rows = []
    for cell in result["cells"]:
        us = (f"{cell['median_us'][name]:.0f}" for name in ARMS)
        rows.append((cell["batch"], *us, f"{cell['stock_over_plugin']:.2f}"))
    return ("batch", *(f"{name}, median us" for name in ARMS), "stock / plugin"), rows, f"K = {result['k']}"


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="how often each arm runs")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64])
    args = parser.parse_args()
    cells = []
    for batch in args.batch:
        samples: dict[str, list[float]] = {name: [] for name in ARMS}
        for _ in range(args.rounds):
            for name, env in ARMS.items():
                samples[name] += [round(us, 1) for us in arms.run(run_arm, env, batch=batch)]
        median = {name: statistics.median(us) for name, us in samples.items()}
        ratio = median["stock V1"] / median["plugin V1"]
        cells.append({"batch": batch, "median_us": median, "stock_over_plugin": ratio, "samples_us": samples})
    report = {"k": K, "rounds": args.rounds, **provenance(), "cells": cells}
    print(arms.table(*published(report)))
    arms.write_result(args.out, __doc__, report)


if __name__ == "__main__":
    main()
