"""Variants of a head on the real target: a selector fitted after its training, other seeds.

``make real-target`` first. ``peagle-vllm sharpen`` makes the variants of the P-EAGLE head without a selector, from
prompts that the target wrote; HumanEval and MT-Bench measure them as in ``benchmarks.real``. What ``sharpen`` made is
kept in .cache/real-bench.
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
    MAX_TOKENS,
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

PROMPTS, K = 1200, 3
SIZES = (4096, 8192, 16384, 32768)  # draft vocabularies
BASE, JOINT = RealArm(PLAIN, "peagle-plain", K), RealArm("P-EAGLE", "peagle", K, selector=True)


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
    out = WORK / f"variants-{BASE.digest()}" / name

    def make() -> Any:
        ended = [{"prompt": row["text"]} for row in read_rows("prompts.sampled") if row["end"] == "stop"]
        prompts = out.with_suffix(".jsonl")
        prompts.write_text("\n".join(map(json.dumps, ended[:num_prompts])), encoding="utf-8")
        how = {"target": TARGET, "prompts": prompts, "engine": json.dumps(ENGINE)}
        return sharpen(HEADS / "peagle-plain", out, NONE.env, "-k", str(K), *options, **how)

    return out, arms.kept(out.with_suffix(".json"), make)


def compared(arm: RealArm, base: RealArm, **facts: Any) -> dict[str, Any]:
    """A row of the result: an arm's AL by set, and its gain over another's."""
    none = acceptance(NONE, None, {})["sets"]
    first = {name: none[name]["first"] for name in SETS}
    other, mine = (acceptance(each, None, first) for each in (base, arm))
    row = {"name": arm.name, "k": arm.k, "against": base.name, "commit": mine["commit"], **facts, "sets": {}}
    for name in SETS:
        counts = np.asarray(mine["sets"][name]["counts"])
        row["sets"][name] = al_of(counts) | gain_of(counts, np.asarray(other["sets"][name]["counts"]))
    print(row, flush=True)
    return row


def variants() -> dict[str, Any]:
    """Rows of what ``sharpen`` made."""
    folder, report = made("sharpened", PROMPTS)
    after = RealArm("P-EAGLE sharpened after training", str(folder), K, selector=True)
    rows = [compared(after, BASE, sharpen=report), compared(JOINT, after)]
    return {"max_tokens": MAX_TOKENS, "prompts": PROMPTS, "engine": ENGINE, "coverage": coverage(), "variants": rows}


def seeds(heads: Path) -> dict[str, Any]:
    """Rows of the same heads, trained with another seed."""
    plain, joint = (
        replace(arm, name=f"{arm.name}, second seed", head=str(heads / str(arm.head))) for arm in (BASE, JOINT)
    )
    pairs = ((plain, BASE), (joint, JOINT), (joint, plain))
    rows = [compared(arm, base) for arm, base in pairs]
    reports = {arm.name: json.loads((Path(str(arm.head)) / "training.json").read_text()) for arm in (plain, joint)}
    trained = {
        name: {"settings": of["settings"], "commit": of["commit"], "al": [row for row in of["al"] if row["K"] == K]}
        for name, of in reports.items()
    }
    return {"max_tokens": MAX_TOKENS, "engine": ENGINE, "variants": rows, "trained": trained}


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--seeds", type=Path, metavar="FOLDER", help="measure this instead: `real.py --seed` --out")
    args, found_by = parser.parse_args(), provenance()
    found = seeds(args.seeds.absolute()) if args.seeds else variants()
    arms.write_result(args.out, __doc__, found | found_by)


if __name__ == "__main__":
    main()
