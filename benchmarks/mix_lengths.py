"""Heads trained on short documents, on long ones and on both, by ``data.mix`` alone, and their AL on each kind.

All are trained on one data set for as many steps.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks import arms
from benchmarks.compare_heads import mean
from benchmarks.tiny_heads import MODELS, Arm, write_config
from peagle_tools.shared.acceptance import sum_of
from peagle_tools.shared.provenance import provenance

TARGET, SEEDS, HELD_OUT, GROUPS, K = "tiny-llama", (0, 1), 96, 10, 7  # groups: of each kind, for its standard error
LONG, ENDS = 800, (320, 1024)  # tokens: of a long prompt; of a short and a long document, with its answer, at most
BOTH = "half the tokens of each"
MIXES = {"short documents": (1.0, 0.0), BOTH: (0.5, 0.5), "long documents": (0.0, 1.0)}


def write_prompts(file: Path, num_short: int, num_long: int) -> None:
    """Short prompts of what the tiny models learned from, and long ones: more of that text before such a prompt."""
    from tokenizers import Tokenizer

    sys.path.append(str(MODELS / "recipe"))
    from corpus import pieces
    from plan import SEED

    found, tokenizer = pieces(held_out=False, seed=SEED), Tokenizer.from_file(str(MODELS / TARGET / "tokenizer.json"))
    texts = [piece.prompt for piece in found[:num_short]]
    for at in range(num_short, num_short + 4 * num_long, 4):
        text = "\n".join([*(piece.text for piece in found[at : at + 3]), found[at + 3].prompt])
        texts.append(tokenizer.decode(tokenizer.encode(text).ids[-LONG:]))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_mixed(folder: Path, seed: int, steps: int, way: str) -> Path:
    """peagle.yaml of a head."""
    file = write_config(TARGET, folder, Arm(), seed, steps)
    settings = yaml.safe_load(file.read_text())
    settings["data"] |= {"held_out": HELD_OUT, "mix": dict(zip(ENDS, MIXES[way], strict=True))}
    file.write_text(yaml.safe_dump(settings))
    return file


def train(way: str, seed: int, steps: int, data: str, folder: str) -> list[list[float]]:
    """Train a head in this process; AL of each group of held-out documents, the short ones and the long ones."""
    import torch
    from speculators.models.eagle3.data import shift_batch

    from peagle_tools.train.config import read_config
    from peagle_tools.train.replay import replay
    from peagle_tools.train.run import train as train_ours

    torch.set_num_threads(1)
    config = read_config(write_mixed(Path(folder), seed, steps, way))
    config.run.mkdir(exist_ok=True)
    if not config.data_folder.exists():
        config.data_folder.symlink_to(data)
    trainer = train_ours(config)
    trainer.head.eval()
    held_out = trainer.val_loader.dataset
    documents = [shift_batch(held_out[number]) for number in range(len(held_out))]

    def lengths(some: list[dict[str, Any]]) -> list[float]:
        found = [replay(trainer.head, some[at::GROUPS], K, config.data.max_tokens)[K - 1] for at in range(GROUPS)]
        return [round(sum_of([*by_context.values()]).length, 4) for by_context in found]

    short = [len(document["input_ids"]) < ENDS[0] for document in documents]
    return [
        lengths([one for one, is_short in zip(documents, short, strict=True) if is_short == kind]) for kind in (1, 0)
    ]


def published(result: dict[str, Any]) -> arms.Published:
    """A row for each mix: AL on documents of each kind, and how much that is more than ``BOTH`` has."""

    def cell(way: str, kind: int) -> str:
        here, both = (
            [sum(seeds) / len(seeds) for seeds in zip(*(one[kind] for one in result["al"][name]), strict=True)]
            for name in (way, BOTH)
        )
        more = mean(a - b for a, b in zip(here, both, strict=True))
        return "{:.2f} ± {:.2f}".format(*mean(here)) + ("" if way == BOTH else " ({:+.2f} ± {:.2f})".format(*more))

    notes = (
        f"{TARGET}, {result['steps']} steps of 1,024 tokens, seeds: {len(result['al'][BOTH])}",
        f"AL at K = {K} by replay, {HELD_OUT} held-out documents; ±: one standard error over {GROUPS} groups a kind",
        f"in brackets the difference to {BOTH}",
    )
    columns = ("trained on", f"AL after up to {ENDS[0]} tokens", f"AL after {LONG:,} to {ENDS[1]:,} tokens")
    return columns, [(way, cell(way, 0), cell(way, 1)) for way in MIXES], "; ".join(notes)


def main() -> int:
    parser = arms.parser(__doc__)
    parser.add_argument("--work", type=Path, default=MODELS / ".build/mix")
    parser.add_argument("--steps", type=int, default=100, help="of each head")
    parser.add_argument("--prompts", type=int, nargs=2, default=(700, 200), help="short ones and long ones")
    args = parser.parse_args()
    file, prompts = write_mixed(args.work, 0, args.steps, BOTH), args.work / "prompts.jsonl"
    write_prompts(prompts, *args.prompts)
    first = ["prompts", prompts, "--pii", "none", "--out", args.work / "run/prompts.jsonl"]
    for words in (first, ["answers", file], ["data", file], ["states", file]):
        subprocess.run([sys.executable, "-m", "peagle_tools.cli", "train", *map(str, words)], check=True)
    common: dict[str, Any] = {"steps": args.steps, "data": str((args.work / "run/data").resolve())}
    report: dict[str, Any] = {"steps": args.steps, "prompts": args.prompts, "al": {way: [] for way in MIXES}}
    for seed in SEEDS:
        for way, found in report["al"].items():
            found.append(arms.run(train, {}, way=way, seed=seed, folder=str(args.work / f"{way}-{seed}"), **common))
            print(way, seed, found[-1], flush=True)
        arms.write_result(args.out, __doc__, report | provenance())
    print(arms.table(*published(report)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
