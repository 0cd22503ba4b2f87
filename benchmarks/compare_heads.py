"""Heads trained on the same data for as many steps, in several ways: ``make compare-heads``.

P-EAGLE by ``peagle-vllm train run`` with speculators' default loss and with others, P-EAGLE and EAGLE-3 by speculators'
own trainer. All begin as the target's last layers. What is finished stays: the same command goes on.
"""

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import arms
from benchmarks.engines import prepare_process, tiny_pair
from benchmarks.heldout import read_prompts
from benchmarks.tiny_heads import AS_SHIPPED, EAGLE3, GAMMA, MODELS, PROMPTS, TOP, Arm, make_data, train
from peagle_tools.shared.acceptance import read_engine
from peagle_tools.shared.provenance import provenance

KS, GROUP, MAX_TOKENS = (3, 5, 7), 4, 96  # GROUP prompts in a group of the standard error; tokens of an answer
SEEDS = {"tiny-llama": (0, 1, 2), "tiny-qwen3": (0,)}

BASE = "P-EAGLE"
ARMS = {
    BASE: Arm(),
    "P-EAGLE, speculators' trainer": Arm(by="speculators"),
    "EAGLE-3, speculators' trainer": EAGLE3,
    "kl_div and ce, half each": AS_SHIPPED,
    "tv": Arm("tv"),
    "nla": Arm("nla"),
    "lk_hybrid": Arm("lk_hybrid"),
    f"kl_div, rows of depth d weighted {GAMMA}^d": Arm(weighted=True),
    f"kl_div, the target's {TOP} likeliest tokens": Arm(top=True),
}
OF_EVERY_SEED = tuple(ARMS)[:3]


def measure(target: str, head: str, num_k: int, parallel: bool, count: int = PROMPTS) -> list[float]:
    """AL of each group of ``count`` held-out prompts that RESULTS.json does not use, greedy, in this process."""
    prepare_process()
    from vllm import LLM, SamplingParams

    arguments = tiny_pair(target, None, num_k)
    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": num_k, "parallel_drafting": parallel}
    arguments |= {"max_model_len": 1024, "max_num_seqs": GROUP, "disable_log_stats": False}
    llm, found = LLM(**arguments | {"speculative_config": speculative}), []
    prompts = read_prompts(llm, MODELS / "prompts/heldout.jsonl", 2 * PROMPTS)[PROMPTS:]
    for at in range(0, count, GROUP):
        before = read_engine(llm)
        llm.generate(prompts[at : at + GROUP], SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
        found.append(round(read_engine(llm).since(before).length, 4))
    return found


def mean(lengths: Iterable[float]) -> tuple[float, float]:
    """Of groups, and its standard error."""
    lengths = list(lengths)
    return statistics.mean(lengths), statistics.stdev(lengths) / len(lengths) ** 0.5


def published(result: dict[str, Any]) -> arms.Published:
    """A row for each way: AL for each target and K, and beside it how much that is more than ``BASE`` has."""
    found: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    for row in result["rows"]:
        for num_k, groups in row["al"].items():
            found.setdefault((row["way"], row["target"], int(num_k)), {})[row["seed"]] = groups

    def cell(way: str, target: str, num_k: int) -> str:
        here, base = found.get((way, target, num_k), {}), found.get((BASE, target, num_k), {})
        if not here:
            return ""
        of_groups = [statistics.mean(groups) for groups in zip(*here.values(), strict=True)]
        length, error = mean(of_groups)
        if way == BASE or not set(here) <= set(base):
            return f"{length:.2f} ± {error:.2f}"
        others = [statistics.mean(groups) for groups in zip(*(base[seed] for seed in here), strict=True)]
        more, error = mean(a - b for a, b in zip(of_groups, others, strict=True))
        return f"{length:.2f} ({more:+.2f} ± {error:.2f})"

    counts = Counter(row["way"] for row in result["rows"] if row["target"] == "tiny-llama")
    seeds = ", ".join(f"{count} of {way}" for way, count in counts.items() if count > 1) + "; of the others 1"
    cells = [(target, num_k) for target in SEEDS for num_k in KS]
    ways = dict.fromkeys(row["way"] for row in result["rows"])
    rows = [(way, *(cell(way, *of) for of in cells)) for way in ways]
    columns = ("way", *(f"{target}, K = {num_k}" for target, num_k in cells))
    notes = (
        f"{result['steps']} steps of 1,024 tokens; {PROMPTS} held-out prompts, up to {MAX_TOKENS} tokens, greedy",
        f"±: one standard error over groups of {GROUP} prompts; in brackets the difference to {BASE} of the same seeds",
        f"seeds on tiny-llama: {seeds}",
    )
    return columns, rows, "; ".join(notes)


def main() -> int:
    parser = arms.parser(__doc__)
    parser.add_argument("--work", type=lambda text: Path(text).resolve(), default=MODELS / ".build/compare")
    parser.add_argument("--steps", type=int, default=150, help="of each head")
    parser.add_argument("--prompts", type=int, default=2000, help="that the heads learn from")
    args = parser.parse_args()
    report: dict[str, Any] = {"steps": args.steps, "prompts": args.prompts, "rows": []}
    if args.out and args.out.exists():
        before = json.loads(args.out.read_text())
        if any(before[name] != report[name] for name in ("steps", "prompts")):
            raise SystemExit(f"{args.out}: is of other --steps or --prompts; give another --out")
        report["rows"] = before["rows"]
    done = {(row["target"], row["way"], row["seed"]) for row in report["rows"]}
    jobs = [
        (target, way, seed)
        for way in ARMS
        for target, seeds in SEEDS.items()
        for seed in seeds
        if seed == 0 or way in OF_EVERY_SEED
    ]
    data: dict[str, Path] = {}
    for target, way, seed in (job for job in jobs if job not in done):
        if target not in data:
            data[target] = make_data(target, args.work / target, args.prompts)
        place = args.work / target / f"{re.sub('[^a-z0-9]+', '-', way.lower())}-{seed}"
        print(target, way, seed, "...", flush=True)
        common = {"target": target, "seed": seed, "steps": args.steps, "data": str(data[target]), "folder": str(place)}
        trained = arms.run(train, {}, arm=asdict(ARMS[way]), **common)
        parallel = ARMS[way].kind == "peagle"
        al = {k: arms.run(measure, {}, target=target, head=trained["head"], num_k=k, parallel=parallel) for k in KS}
        found = {"target": target, "way": way, "seed": seed, "seconds": trained["seconds"], "al": al}
        report["rows"].append(json.loads(json.dumps(found)))
        arms.write_result(args.out, __doc__, report | provenance())
        print(*(f"K = {k}: {statistics.mean(lengths):.3f}" for k, lengths in al.items()), flush=True)
    print(arms.table(*published(report)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
