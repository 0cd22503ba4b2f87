"""Measure the tiny pairs in vLLM on held-out prompts and write RESULTS.json; ``make docs`` then writes its tables.

Every arm is a process of its own: greedy, float32, on whatever model runner vLLM chooses. AL is the acceptance length,
bonus token included: 1 + accepted / drafts, over all prompts, 16 at a time.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import islice, product
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm
from transformers import AutoTokenizer

from benchmarks import arms
from benchmarks.engines import measure_pair
from models.recipe.corpus import fingerprint, pieces
from models.recipe.heads import MAX_TOKENS, PROMPTS
from models.recipe.plan import STAGES
from peagle_tools.shared.provenance import versions

BATCH = 16
HELD_OUT, MAX_PROMPT_TOKENS = 96, 100
LLAMA_HEADS = ("eagle3", "eagle3-4l", "peagle", "peagle-d2t")
ARMS = [
    ("tiny-llama", None, 0),
    *(("tiny-llama", f"tiny-llama-{head}", k) for head, k in product(LLAMA_HEADS, (3, 5, 7))),
    ("tiny-qwen3", None, 0),
    *(("tiny-qwen3", "tiny-qwen3-peagle", k) for k in (5, 7)),
]


def write_prompts(tokenizer_folder: Path, file: Path) -> None:
    """HELD_OUT lines ``{"prompt": ...}``: openings of pieces from files that no model was trained on."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    trained_on = {piece.prompt for piece in pieces(held_out=False)}
    openings = dict.fromkeys(piece.prompt for piece in pieces(held_out=True))
    fresh = (text for text in openings if text not in trained_on)
    short = (text for text in fresh if len(tokenizer.encode(text)) <= MAX_PROMPT_TOKENS)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in islice(short, HELD_OUT)))


def run_arm(target: str, head: str | None, k: int, models: Path) -> dict:
    """One arm of RESULTS.json, measured in a fresh process."""
    rows = (models / "prompts/heldout.jsonl").read_text().splitlines()[:PROMPTS]
    common = {"batch": BATCH, "prompts": [json.loads(row)["prompt"] for row in rows], "max_tokens": MAX_TOKENS}
    found = arms.run(measure_pair, {}, target=target, head=head, k=k, models=str(models.resolve()), **common)
    row = {"target": target, "head": head, "k": k, "al": round(found["acceptance_length"], 3)}
    return row | ({"acceptance": [round(share, 3) for share in found["acceptance"]]} if head else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path(__file__).resolve().parent.parent)
    args = parser.parse_args()
    results_file = args.models / "RESULTS.json"
    old = json.loads(results_file.read_text()) if results_file.exists() else {}
    write_prompts(args.models / "tiny-llama", args.models / "prompts/heldout.jsonl")
    there = [arm for arm in ARMS if (args.models / (arm[1] or arm[0])).is_dir()]
    with ThreadPoolExecutor(2) as pool:
        rows = list(tqdm(pool.map(lambda arm: run_arm(*arm, args.models), there), total=len(there), unit="arm"))
    fresh = {file.stem: json.loads(file.read_text()) for file in (args.models / ".build").glob("*.json")}
    reported = old.get("training", {}) | fresh  # stages that were not rebuilt keep their old figures
    sizes = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "batch": BATCH, "temperature": 0, "dtype": "float32"}
    results = {
        "protocol": {**sizes, "al": "1 + accepted / drafts"},
        "versions": {**versions(), "speculators": version("speculators")},
        "corpus": {"fingerprint": fingerprint()},
        "arms": rows,
        "training": {name: reported[name] for name in STAGES if name in reported},
    }
    results_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
