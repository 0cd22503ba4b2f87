"""Variants of a head on the real target: fewer draft tokens, 8 bits, a selector fitted after its training, other seeds.

``make real-target`` and ``python models/recipe/real.py --seed 1 --out .cache/real-bench/seed-1`` first. ``peagle-vllm
sharpen`` makes the variants of the P-EAGLE head without a selector, from prompts that the target wrote; HumanEval and
MT-Bench measure them as in ``benchmarks.real``. What each step made is kept in .cache/real-bench.
"""

import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arms
from benchmarks.engines import sharpen
from benchmarks.real import (
    ENGINE,
    HEADS,
    NONE,
    PLAIN,
    SETS,
    TARGET,
    WORK,
    RealArm,
    acceptance,
    al_of,
    gain_of,
)
from peagle_tools.shared.provenance import provenance
from peagle_tools.sharpen.reduce import step_bytes
from peagle_vllm.heads.head import read_head

PROMPTS, FEWER, K = 1200, 300, 3  # FEWER choose the draft tokens
SIZES = (4096, 8192, 16384, 32768)  # draft vocabularies
SMALLER = {"4,096 draft tokens": ("--draft-vocab=4096",), "int8": ("--quantize=int8",)}
BASE, JOINT = RealArm(PLAIN, "peagle-plain", K), RealArm("P-EAGLE", "peagle", K, selector=True)
SEED = WORK / "seed-1"


def read_rows(name: str) -> list[dict[str, Any]]:
    return list(map(json.loads, lzma.decompress((HEADS / f"{name}.jsonl.xz").read_bytes()).splitlines()))


def coverage() -> dict[int, float]:
    """By size, the share of held-out answers' tokens in a draft vocabulary of those that the others say most."""
    rows = read_rows("answers")
    said = [np.asarray(row["input_ids"])[np.asarray(row["loss_mask"]) == 1] for row in rows]
    counts = np.bincount(np.concatenate(said[128:]), minlength=1 << 16)
    rank = np.empty_like(counts)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return {size: round(float((rank[np.concatenate(said[:128])] < size).mean()), 4) for size in SIZES}


def made(name: str, num_prompts: int, *options: str) -> tuple[Path, Any]:
    """A variant's folder, and what ``sharpen`` reports."""
    out = WORK / "variants" / name

    def make() -> Any:
        ended = [{"prompt": row["text"]} for row in read_rows("prompts.sampled") if row["end"] == "stop"]
        prompts = out.with_suffix(".jsonl")
        prompts.write_text("\n".join(map(json.dumps, ended[:num_prompts])), encoding="utf-8")
        how = {"target": TARGET, "prompts": prompts, "engine": json.dumps(ENGINE)}
        return sharpen(HEADS / "peagle-plain", out, NONE.env, "-k", str(K), *options, **how)

    return out, arms.kept(out.with_suffix(".json"), make)


def main() -> None:
    out, found_by = arms.parser(__doc__).parse_args().out, provenance()
    if missing := [head for arm in (BASE, JOINT) if not (head := SEED / str(arm.head)).is_dir()]:
        raise SystemExit(f"{missing[0]}: no head of another seed is there; see --help")
    rows: list[dict[str, Any]] = []

    def measure(arm: RealArm, base: RealArm, **facts: Any) -> None:
        first: dict[str, list[str]] = {}
        cells = []
        for each in (NONE, base, arm):  # the first two are of ``make real``
            found = acceptance(each, None, first, found_by["commit"])
            cells.append(found["sets"])
            first = first or {name: cells[0][name]["first"] for name in SETS}
        row = {"name": arm.name, "k": arm.k, "against": base.name, "commit": found["commit"], **facts, "sets": {}}
        for name in SETS:
            mine, other = (np.asarray(cell[name]["counts"]) for cell in cells[1:][::-1])
            row["sets"][name] = al_of(mine) | gain_of(mine, other)
        rows.append(row)
        print(row, flush=True)

    for name, options in SMALLER.items():
        folder, report = made(name, FEWER, "--no-selector", *options)
        read = {"bytes": step_bytes(read_head(folder)), "bytes_before": step_bytes(read_head(HEADS / "peagle-plain"))}
        measure(RealArm(f"{PLAIN}, {name}", str(folder), K), BASE, **read, options=options, sharpen=report)
    folder, report = made("sharpened", PROMPTS)
    after = RealArm("P-EAGLE sharpened after training", str(folder), K, selector=True)
    measure(after, BASE, sharpen=report)
    measure(JOINT, after)
    plain, joint = (
        replace(arm, name=f"{arm.name}, second seed", head=str(SEED / str(arm.head))) for arm in (BASE, JOINT)
    )
    for arm, base in ((joint, plain), (joint, JOINT), (plain, BASE)):
        measure(arm, base)
    how = {"prompts": PROMPTS, "engine": ENGINE, "coverage": coverage(), "variants": rows}
    arms.write_result(out, __doc__, how | found_by)


if __name__ == "__main__":
    main()
