"""A head for tiny-llama from prompts to a server, by the commands that users run: ``make train-tiny``.

``peagle-vllm train pipeline`` (personal data out, the target's answers, hidden states, training, the check that vLLM
and replay agree), ``peagle-vllm inspect``, and AL as both model runners serve it.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import arms
from benchmarks.compare_heads import GROUP, KS, measure
from benchmarks.tiny_heads import AS_SHIPPED, MODELS, PROMPTS, write_config, write_prompts
from peagle_tools.shared.provenance import provenance

TARGET = "tiny-llama"
# Prompts that each runner serves; V2 runs in Triton's interpreter where there is no GPU.
SERVED = {"V1": (arms.V1, PROMPTS), "V2": (arms.V2, PROMPTS if arms.HAS_GPU else 8)}


def published(result: dict[str, Any]) -> arms.Published:
    """A row for each K: AL by replay, as the pipeline's check counted it in vLLM, and of each runner's own prompts."""
    count = GROUP * len(result["V2"][0])
    columns = ("K", "replay", "vLLM", "V1", f"V1, first {count} prompts", f"V2, first {count} prompts")
    rows = []
    for k, v1, v2 in zip(KS, result["V1"], result["V2"], strict=True):
        lengths = [*(result["check"][how][str(k)] for how in ("replay", "vllm")), statistics.mean(v1)]
        lengths += [statistics.mean(groups[: len(v2)]) for groups in (v1, v2)]
        rows.append((k, *(f"{length:.3f}" for length in lengths)))
    return columns, rows, f"{result['steps']} steps, {result['minutes']} minutes from prompts to the last column"


def main() -> int:
    parser = arms.parser(__doc__)
    parser.add_argument("--work", type=Path, default=MODELS / ".build/train-tiny")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--prompts", type=int, default=1200, help="that the head learns from")
    args = parser.parse_args()
    began, command = time.time(), [sys.executable, "-m", "peagle_tools.cli"]
    env = os.environ | ({} if arms.HAS_GPU else arms.ON_CPU)
    shutil.rmtree(args.work, ignore_errors=True)
    file = write_config(TARGET, args.work, AS_SHIPPED, 0, args.steps)
    write_prompts(args.work, args.prompts)
    subprocess.run([*command, "train", "pipeline", str(file)], env=env, check=True)
    head = args.work / "run/checkpoints/best"
    subprocess.run([*command, "inspect", str(head.resolve()), "--target", str(MODELS / TARGET)], env=env, check=True)
    served = {
        runner: [arms.run(measure, env, target=TARGET, head=str(head), num_k=k, parallel=True, count=count) for k in KS]
        for runner, (env, count) in SERVED.items()
    }
    check: dict[str, dict[str, float]] = {"replay": {}, "vllm": {}}
    for line in map(json.loads, (args.work / "run/al.jsonl").read_text().splitlines()):
        check[line["how"]][str(line["K"])] = line["al"]
    report = {"target": TARGET, "steps": args.steps, "prompts": args.prompts, "held_out": PROMPTS, "check": check}
    report |= {**served, "minutes": round((time.time() - began) / 60, 1), **provenance()}
    arms.write_result(args.out, __doc__, report)
    print(arms.table(*published(report)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
