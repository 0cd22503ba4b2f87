"""Sharpen the tiny P-EAGLE heads with ``peagle-vllm sharpen``: ``make sharpen``.

Both pairs at once, a process of one thread each: fitted to prompts that the heads learned from, measured on the
held-out ones of RESULTS.json. A sharpened head goes beside the head that it was made of.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from build import publish
from corpus import pieces
from evaluate import MAX_TOKENS, PROMPTS
from plan import SEED

from benchmarks import arms
from peagle_vllm.provenance import provenance

PAIRS = {"tiny-llama": "tiny-llama-peagle", "tiny-qwen3": "tiny-qwen3-peagle"}
LEARN = 6000  # prompts
ENGINE = {"dtype": "float32", "max_num_seqs": 128, "kv_cache_memory_bytes": 512 << 20}


def start(target: str, head: str, models: Path, work: Path, files: list[str]) -> subprocess.Popen[str]:
    """``peagle-vllm sharpen`` of one pair, which goes on from where it was stopped."""
    places = [str(models / head), str(work / f"{head}-sharp"), "--target", str(models / target)]
    options = [*files, "--max-tokens", str(MAX_TOKENS), "--engine", json.dumps(ENGINE), "--json"]
    command = [sys.executable, "-m", "peagle_vllm.cli", "sharpen", *places, *options]
    return subprocess.Popen(command, env=arms.environment({}), stdout=subprocess.PIPE, text=True)


def main() -> int:
    parser = arms.parser(__doc__)
    parser.add_argument("--models", type=Path, default=Path(__file__).resolve().parent.parent)
    args = parser.parse_args()
    work: Path = args.models.resolve() / ".build/sharpen"
    work.mkdir(parents=True, exist_ok=True)
    learn, held_out = work / "prompts.jsonl", work / "held-out.jsonl"
    prompts = [json.dumps({"prompt": piece.prompt}) for piece in pieces(held_out=False, seed=SEED)[:LEARN]]
    learn.write_text("\n".join(prompts))
    held_out.write_text("\n".join((args.models / "prompts/heldout.jsonl").read_text().splitlines()[:PROMPTS]))
    files, began = ["--prompts", str(learn), "--held-out", str(held_out)], time.time()
    for head in PAIRS.values():
        shutil.rmtree(work / f"{head}-sharp", ignore_errors=True)
    running = {head: start(target, head, args.models.resolve(), work, files) for target, head in PAIRS.items()}
    heads: dict[str, Any] = {}
    for head, process in running.items():
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"sharpen {head} ended with exit status {process.returncode}")
        heads[head] = json.loads(output)
        publish(work / f"{head}-sharp", args.models / f"{head}-sharp")
    counts = {"prompts": LEARN, "held_out": PROMPTS, "max_tokens": MAX_TOKENS, "dtype": ENGINE["dtype"]}
    report = {**counts, "minutes": round((time.time() - began) / 60, 1), "heads": heads}
    arms.write_result(args.out, __doc__, report | provenance())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
