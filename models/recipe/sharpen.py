"""Sharpen the tiny P-EAGLE heads with ``peagle-vllm sharpen``: ``make sharpen``.

Both pairs at once, a process of one thread each: fitted to prompts that the heads learned from, measured on the
held-out ones of RESULTS.json. A sharpened head goes beside the head that it was made of.
"""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks import arms
from benchmarks.engines import sharpen
from models.recipe.build import publish
from models.recipe.corpus import pieces
from models.recipe.plan import MAX_TOKENS, PROMPTS

MODELS = arms.ROOT / "models"
TARGETS = ("tiny-llama", "tiny-qwen3")
LEARN = 6000  # prompts
ENGINE = {"dtype": "float32", "max_num_seqs": 128, "kv_cache_memory_bytes": 512 << 20}


def sharpen_head(target: str) -> tuple[str, dict[str, Any]]:
    """The head of a target and its figures; it is sharpened, unless the selector is no better.

    It goes on from where it was stopped.
    """
    head, work = f"{target}-peagle", MODELS / ".build/sharpen"
    place, learn, held_out = (work / f"{head}-sharp{end}" for end in ("", ".learn.jsonl", ".held-out.jsonl"))
    work.mkdir(parents=True, exist_ok=True)
    learn.write_text("\n".join(json.dumps({"prompt": piece.prompt}) for piece in pieces(held_out=False)[:LEARN]))
    held_out.write_text("\n".join((MODELS / "prompts/heldout.jsonl").read_text().splitlines()[:PROMPTS]))
    texts = {"target": MODELS / target, "prompts": learn, "held_out": held_out}
    figures = sharpen(MODELS / head, place, {}, **texts, max_tokens=MAX_TOKENS, engine=json.dumps(ENGINE))
    if place.is_dir():
        publish(place, MODELS / place.name)
    else:  # the old one is of another head
        shutil.rmtree(MODELS / place.name, ignore_errors=True)
    return head, figures


def main() -> None:
    with ThreadPoolExecutor() as pool:
        for head, figures in pool.map(sharpen_head, TARGETS):
            print(head, json.dumps(figures["served"]), flush=True)


if __name__ == "__main__":
    main()
