"""Train the heads of the real target from the committed text, by the commands that users run: ``make real-heads``.

In two rounds: all heads learn from the first answers, and then continue, with a new schedule, with others. What is
there is kept, so a killed run continues. The heads go to models/real, each with its training log.
"""

import argparse
import json
import lzma
import shutil
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.real import HEADS as REAL
from benchmarks.real import TARGET, greedy_drafts
from peagle_tools.shared.atomic_files import write_whole
from peagle_tools.shared.engines import quick_dtype
from peagle_tools.shared.provenance import provenance
from peagle_tools.train.lines import read_lines
from peagle_tools.train.peagle_yaml import Config, read_config
from peagle_tools.train.pipeline import do, settings
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.selector import head_hash

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the target's on the hub
SITTINGS = {"first": (3264, 500), "second": (8576, 1487)}  # answers, 128 of them held out, and steps
# Of peagle.yaml, what differs. EAGLE-3 has the usual one layer and speculators' default of three steps.
HEADS: dict[str, dict[str, Any]] = {
    "peagle": {},  # with its selector
    "eagle3": {"selector": None, "head": {"layers": 1, "depths": 3}, "speculators": {"norm_before_residual": True}},
}


def changed(config: Config, **keys: Any) -> Config:
    """``config`` with other values; a dict changes some keys of a part."""
    found = {}
    for key, value in keys.items():
        old = getattr(config, key)
        part = isinstance(value, dict)
        found[key] = ({**old, **value} if isinstance(old, dict) else old.model_copy(update=value)) if part else value
    return config.model_copy(update=found)


def settings_here() -> Config:
    """peagle.yaml, in the dtype that this machine is quick in."""
    dtype = {"dtype": quick_dtype()}
    return changed(read_config(REAL / "peagle.yaml"), engine=dtype, step=dtype)


def train(head: str, config: Config) -> Path:
    """Train a head; the folder of its best checkpoint."""
    config.run.mkdir(parents=True, exist_ok=True)
    if not config.data_folder.exists():
        config.data_folder.symlink_to(config.run.parent / "data")
    if head == "eagle3":
        return train_eagle3(config)
    do("run", config)
    return config.run / "checkpoints/best"


def train_eagle3(config: Any) -> Path:
    """speculators' own command in this process, without a GPU; the folder of its head.

    It continues from its last checkpoint, whose weights and moments speculators rounds to bfloat16.
    """
    from datasets import load_from_disk
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    from peagle_tools.train import cpu
    from peagle_tools.train.training import to_options
    from peagle_tools.train.warm_start import begin_as_target

    class OnCpu(cli.Trainer):
        def setup_trainer(self) -> None:
            super().setup_trainer()
            self.local_rank = self.device_type = "cpu"

        def train_epoch(self, epoch: int, **options: Any) -> None:
            if self.global_step < steps:  # else it would go on for a step in each epoch
                super().train_epoch(epoch, **options)

    def begun(*args: Any) -> Any:
        head = build(*args).float()
        if init == "target":
            begin_as_target(head, config.target)
        elif unknown := head.load_state_dict(weights, strict=False).unexpected_keys:
            raise SystemExit(f"{init}: {unknown[0]} is no tensor of this head")
        return head

    cpu.setup()
    init = config.head.init
    weights = {} if init == "target" else load_file(f"{init}/model.safetensors")
    stamp, mine = config.run / "settings.json", json.dumps(settings(config)["run"])
    if not stamp.exists() or stamp.read_text() != mine:
        shutil.rmtree(config.run / "checkpoints", ignore_errors=True)
        write_whole(stamp, mine)
    data, held_out = load_from_disk(str(config.data_folder)), config.data.held_out
    rows, steps = len(data), config.optimizer.steps
    flat = to_options(config).flatten() | {
        "speculator_type": "eagle3",
        "epochs": steps * config.step.tokens // sum(data["seq_len"][:-held_out]) + 1,
        "max_steps": steps,
        "checkpoint_freq": 0.05,  # of an epoch
        "train_data_ratio": (rows - held_out + 0.5) / rows,
        "max_anchors": config.step.tokens,
        "ttt_steps": config.head.depths,
        "loss_implementation": "eager",
    }
    if weights:
        for name in ("d2t", "t2d"):  # speculators reads the draft vocabulary from files
            file = config.run / f"{name}.npy"
            np.save(file, weights[name].numpy())
            flat[f"{name}_path"] = str(file)
    build = cli.build_draft_model
    with patch.object(cli, "Trainer", OnCpu), patch.object(cli, "build_draft_model", begun):
        cli.main(TrainConfig.from_sources(cli=flat, argv=[]))
    return max((config.run / "checkpoints").glob("[0-9]*"), key=lambda folder: int(folder.name))


def small(head: Path, folder: Path) -> None:
    """Copy what vLLM reads of ``head`` to ``folder``, without the embeddings, which are the target's own."""
    weights, target = load_file(head / "model.safetensors"), load_file(TARGET / "model.safetensors")
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


def publish(head: Path, place: Path) -> None:
    """Put what is needed of ``head`` at ``place``; what was there is replaced by two renames."""
    fresh, old = place.with_name(f".{place.name}.new"), place.with_name(f".{place.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    small(head, fresh)
    for file in fresh.rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors files come readable by their owner only
    if place.exists():
        place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def train_round(heads: list[str], config: Config, text: bytes, begin: Path | None, out: Path) -> None:
    """Train ``heads`` on the answers ``text`` and publish them in ``out``; without ``begin``, from their target."""
    config.run.mkdir(parents=True, exist_ok=True)
    if not (config.run / "answers.jsonl").exists():
        write_whole(config.run / "answers.jsonl", text)
    for step in ("data", "states"):
        began = time.monotonic()
        do(step, config)
        print(f"{step}: {time.monotonic() - began:.0f} s", flush=True)
    for head in heads:
        of, began = changed(config, folder=str(config.run / head), **HEADS[head]), time.monotonic()
        if begin:
            of = changed(of, head={"init": str(begin / head)})
        best = train(head, of)
        if head != "eagle3":
            do("check", of)
        publish(best, out / head)
        seconds = round(time.monotonic() - began)
        print(f"{head}: {seconds} s", flush=True)
        record(best, of, seconds, begin and begin / head, out / head)


def record(best: Path, config: Config, seconds: int, begin: Path | None, place: Path) -> None:
    """Write how the head in ``place`` was trained, and what it drafts, to its training.json."""
    log, al = (list(read_lines(config.run / name, must_exist=False)) for name in ("log.jsonl", "al.jsonl"))
    held_out = [line for line in log if "held_out" in line][-1:]
    used = settings(changed(config, head={"init": "the first sitting's head"}) if begin else config)["run"]
    report = {
        "settings": used,
        "best": best.resolve().name,
        "al": [line for line in al if line["step"] == al[-1]["step"]],
    }
    report["log"] = [line for line in log if "time" in line][-1:]
    report |= {"held_out": held_out, "last_sitting_seconds": seconds, "drafts": greedy_drafts(place.absolute())}
    if begin:
        report["first"] = json.loads((begin / "training.json").read_text())
    write_whole(place / "training.json", json.dumps(report | provenance(), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REAL, help="where the heads go")
    parser.add_argument("--run", type=Path, help="where everything else goes (default: as peagle.yaml says)")
    parser.add_argument("--only", choices=HEADS, nargs="+", default=list(HEADS), help="these heads (default: all)")
    parser.add_argument("--first", type=Path, help="heads of the first round (default: they are trained)")
    parser.add_argument("--answers", type=int, help="of each round, an eighth of them held out (default: all)")
    parser.add_argument("--steps", type=int, help="of each round (default: all)")
    parser.add_argument("--seed", type=int, help="default: as peagle.yaml says")
    args = parser.parse_args()
    config = settings_here()
    if args.run:
        config = changed(config, folder=str(args.run.absolute()))
    if args.seed is not None:
        config = changed(config, optimizer={"seed": args.seed})
    if args.answers:
        config = changed(config, data={"held_out": args.answers // 8})
    lines = lzma.decompress((REAL / "answers.jsonl.xz").read_bytes()).splitlines(keepends=True)
    begin = None
    for name, (answers, steps) in SITTINGS.items():
        steps, out = args.steps or steps, args.out if name == "second" else config.run / "first/heads"
        every = {part: min(steps, often) for part, often in config.every.model_dump().items()}
        round_config = changed(config, folder=str(config.run / name), optimizer={"steps": steps}, every=every)
        if name == "second" or not args.first:
            train_round(args.only, round_config, b"".join(lines[: args.answers or answers]), begin, out)
        begin, lines = (args.first or out).absolute(), lines[answers:]


if __name__ == "__main__":
    main()
