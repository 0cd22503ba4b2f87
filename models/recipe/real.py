"""Train the heads of the real target from the committed text, by the commands that users run: ``make real-heads``.

What is there is kept, so a killed run continues. The heads go to models/real, each with its training log.
"""

import argparse
import json
import lzma
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import load_file, save_file

from benchmarks import real
from benchmarks.train_eagle3 import of_eagle3, train_eagle3
from benchmarks.train_gpu import changed
from peagle_tools.shared.atomic_files import write_whole
from peagle_tools.shared.engines import quick_dtype
from peagle_tools.shared.provenance import provenance
from peagle_tools.train.lines import read_lines
from peagle_tools.train.peagle_yaml import TRAINING, Config, read_config
from peagle_tools.train.pipeline import do
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.selector import head_hash
from tools.real_target import write_heads

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the target's on the hub


def publish(head: Path, folder: Path) -> None:
    """Put what vLLM reads of ``head`` in ``folder``, without the embeddings, which are the target's own.

    Next to it comes a file for git, without ``lm_head`` too: ``make real-target`` adds the target's rows again.
    """
    weights, target = load_file(head / "model.safetensors"), load_file(real.TARGET / "model.safetensors")
    embeddings = target["model.embed_tokens.weight"]
    if not torch.equal(weights.pop("embed_tokens.weight", embeddings), embeddings):
        raise SystemExit(f"{head}: its embeddings are not the target's; train with embed_requires_grad: false")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lm_head = weights.pop("lm_head.weight")
    save_file(weights, folder.with_suffix(".safetensors"), {"format": "pt"})
    write_heads(real.TARGET, folder.parent)
    if not torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], lm_head):
        raise SystemExit(f"{head}: its lm_head is not the target's; train with lm_head as it is")
    config = json.loads((head / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = NAME
    (folder / "config.json").write_text(json.dumps(config))
    if SELECTOR in config:
        shutil.copytree(head / SELECTOR_FOLDER, folder / SELECTOR_FOLDER)
        config[SELECTOR]["head_hash"] = head_hash(read_head(folder))  # it names every tensor that is there
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in (folder.with_suffix(".safetensors"), *folder.rglob("*.safetensors")):
        file.chmod(0o644)  # safetensors files come readable by their owner only


def train(config: Config, out: Path) -> None:
    """Train both heads on answers.jsonl and publish them in ``out``."""
    for step in ("data", "states"):
        do(step, config)
    for name, learn, settings in (("peagle", train_peagle, config), ("eagle3", train_eagle3, of_eagle3(config))):
        began = time.monotonic()
        best = learn(settings)
        publish(best, out / name)
        record(best, settings, round(time.monotonic() - began), out / name)


def train_peagle(config: Config) -> Path:
    """Train a P-EAGLE head and its selector, and compare it with vLLM; the folder of the best head."""
    do("run", config)
    do("check", config)
    return config.run / "checkpoints/best"


def record(best: Path, config: Config, seconds: int, place: Path) -> None:
    """Write how the head in ``place`` was trained, and what it drafts, to its training.json."""
    log, al = (list(read_lines(config.run / name, must_exist=False)) for name in ("log.jsonl", "al.jsonl"))
    report: dict[str, Any] = {
        "settings": config.model_dump(include=TRAINING),
        "best": best.resolve().name,
        "al": [line for line in al if line["step"] == al[-1]["step"]],
        "log": [line for line in log if "time" in line][-1:],
        "held_out": [line for line in log if "held_out" in line][-1:],
        "seconds": seconds,
        "drafts": real.greedy_drafts(place.absolute()),
    }
    write_whole(place / "training.json", json.dumps(report | provenance(), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=real.HEADS, help="where the heads go")
    parser.add_argument("--run", type=Path, help="where everything else goes (default: as peagle.yaml says)")
    parser.add_argument("--answers", type=int, help="learn from the first so many (default: all)")
    parser.add_argument("--steps", type=int, help="of each head (default: as peagle.yaml says)")
    args = parser.parse_args()
    dtype = {"dtype": quick_dtype()}
    config = changed(read_config(real.HEADS / "peagle.yaml"), engine=dtype, step=dtype)
    if args.run:
        config = changed(config, folder=str(args.run.absolute()))
    if args.answers:
        config = changed(config, data={"held_out": min(config.data.held_out, args.answers // 8)})
    if args.steps:
        config = changed(config, optimizer={"steps": args.steps})
    config.run.mkdir(parents=True, exist_ok=True)
    lines = lzma.decompress((real.HEADS / "answers.jsonl.xz").read_bytes()).splitlines(keepends=True)
    write_whole(config.run / "answers.jsonl", b"".join(lines[: args.answers]))
    train(config, args.out)


if __name__ == "__main__":
    main()
