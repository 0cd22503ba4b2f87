"""Train the head of the real target from the committed text, by the commands that users run: ``make real-heads``.

What is there is kept, so a killed run continues. The head goes to models/real/peagle, its training log beside it.
"""

import json
import lzma
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from build import publish
from safetensors.torch import load_file, save_file

from benchmarks import arms
from benchmarks.arms import ROOT
from benchmarks.heldout import measure
from benchmarks.real import read_set
from peagle_tools.shared.files import new_folder, write_whole
from peagle_tools.shared.provenance import provenance
from peagle_tools.train.config import read_config
from peagle_tools.train.pipeline import settings
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.selector import head_hash

REAL = ROOT / "models/real"
RECORD = {"target": ".cache/real-target", "head": "models/real/peagle", "k": 7, "batch": 4, "max_tokens": 64}
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the target's on the hub


def small(head: Path, folder: Path) -> None:
    """Copy what vLLM reads of ``head`` to ``folder``, without the embeddings, which are the target's own."""
    weights, target = load_file(head / "model.safetensors"), load_file(ROOT / ".cache/real-target/model.safetensors")
    if not torch.equal(weights.pop("embed_tokens.weight"), target["model.embed_tokens.weight"]):
        raise SystemExit(f"{head}: its embeddings are not the target's; train with embed_requires_grad: false")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((head / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = NAME
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    if SELECTOR in config:
        shutil.copytree(head / SELECTOR_FOLDER, folder / SELECTOR_FOLDER)
        config[SELECTOR]["head_hash"] = head_hash(read_head(folder))  # it names every tensor that is there
    file.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    file = REAL / "peagle.yaml"
    config = read_config(file)
    config.run.mkdir(parents=True, exist_ok=True)
    if (text := config.run / "answers.jsonl").exists():
        print(f"the text is what {text} has already")
    else:
        write_whole(text, lzma.decompress((REAL / "answers.jsonl.xz").read_bytes()))
    seconds: dict[str, int] = {}
    for step in ("data", "states", "run", "check"):
        began = time.monotonic()
        command = [sys.executable, "-m", "peagle_tools.cli", "train", step, str(file)]
        if status := subprocess.run(command, check=False).returncode:
            raise SystemExit(status)
        seconds[step] = round(time.monotonic() - began)
    best, made = config.run / "checkpoints/best", config.run / "peagle"
    shutil.rmtree(made, ignore_errors=True)
    with new_folder(made) as folder:
        small(best, folder)
    publish(made, REAL / "peagle")
    lines: dict[str, list[dict[str, Any]]] = {
        name: [json.loads(line) for line in (config.run / f"{name}.jsonl").read_text().splitlines()]
        for name in ("al", "log")
    }
    held_out = [line for line in lines["log"] if "held_out" in line]
    report = {"settings": settings(config)["run"], "best": best.readlink().name, "al": lines["al"]}
    record = arms.run(
        measure, {}, **RECORD, models=str(ROOT), prompts=[words[0] for words in read_set("humaneval")[:4]]
    )
    write_whole(REAL / "record.json", json.dumps({**RECORD, **record}, indent=1) + "\n")
    report |= {"held_out": held_out, "last_sitting_seconds": seconds, **provenance()}
    write_whole(REAL / "training.json", json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
