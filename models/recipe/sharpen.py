"""Sharpen the tiny P-EAGLE heads with ``peagle-vllm sharpen``: ``make sharpen``.

Both pairs at once, a process of one thread each: fitted to prompts that the heads learned from, measured on the
held-out ones of RESULTS.json. A sharpened head goes beside the head that it was made of.
"""

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from corpus import pieces
from plan import MAX_TOKENS, PROMPTS, SEED
from publish import publish

from benchmarks import arms
from peagle_tools.shared.provenance import provenance

PAIRS = {"tiny-llama": "tiny-llama-peagle", "tiny-qwen3": "tiny-qwen3-peagle"}
LEARN = 6000  # prompts
ENGINE = {"dtype": "float32", "max_num_seqs": 128, "kv_cache_memory_bytes": 512 << 20}


def sharpen(target: Path, head: Path, place: Path) -> dict[str, Any]:
    """``peagle-vllm sharpen`` of one pair into ``place``, unless the selector is no better; its figures.

    It goes on from where it was stopped.
    """
    learn, held_out = (place.with_name(f"{place.name}.{name}.jsonl") for name in ("learn", "held-out"))
    texts = [json.dumps({"prompt": piece.prompt}) for piece in pieces(held_out=False, seed=SEED)[:LEARN]]
    learn.write_text("\n".join(texts))
    held_out.write_text("\n".join((arms.ROOT / "models/prompts/heldout.jsonl").read_text().splitlines()[:PROMPTS]))
    shutil.rmtree(place, ignore_errors=True)
    options = ["--target", str(target), "--prompts", str(learn), "--held-out", str(held_out)]
    options += ["--max-tokens", str(MAX_TOKENS), "--engine", json.dumps(ENGINE), "--json"]
    command = [sys.executable, "-m", "peagle_tools.cli", "sharpen", str(head), str(place), *options]
    done = subprocess.run(command, env=arms.environment({}), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: no better
        raise SystemExit(f"sharpen {head.name} ended with exit status {done.returncode}")
    return json.loads(done.stdout)


def main() -> int:
    parser = arms.parser(__doc__)
    parser.add_argument("--models", type=Path, default=Path(__file__).resolve().parent.parent)
    models: Path = (args := parser.parse_args()).models.resolve()
    work, began = models / ".build/sharpen", time.time()
    work.mkdir(parents=True, exist_ok=True)

    def one(pair: tuple[str, str]) -> dict[str, Any]:
        target, head = pair
        found = sharpen(models / target, models / head, work / f"{head}-sharp")
        publish(work / f"{head}-sharp", models / f"{head}-sharp")
        return found

    with ThreadPoolExecutor() as pool:
        heads = dict(zip(PAIRS.values(), pool.map(one, PAIRS.items()), strict=True))
    counts = {"prompts": LEARN, "held_out": PROMPTS, "max_tokens": MAX_TOKENS, "dtype": ENGINE["dtype"]}
    report = {**counts, "minutes": round((time.time() - began) / 60, 1), "heads": heads}
    arms.write_result(args.out, __doc__, report | provenance())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
