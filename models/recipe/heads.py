"""Heads of the tiny targets: ``peagle-vllm train`` makes their data and P-EAGLE, speculators' own trainer EAGLE-3.

Every head begins as its target's last layers.
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.engines import sharpen
from models.recipe.corpus import pieces
from peagle_tools.shared.server import HOST, free_port
from peagle_tools.train.config import Config, read_config

PROMPTS, MAX_TOKENS = 48, 96  # prompts that acceptance is measured on, and the longest answer
ARM: dict[str, Any] = {  # how the shipped P-EAGLE heads are trained
    "kind": "peagle",  # by our trainer, or eagle3 by speculators' own
    "layers": 4,
    "depths": 8,  # that P-EAGLE drafts at once, or steps that EAGLE-3 is trained to go on alone
    "muon_lr": 0.01,  # peak learning rate of the matrices; AdamW's, of all else, is a tenth of it
    "draft_vocab": None,
    "init": "target",  # or a finished head
}


def changed(config: Config, **keys: Any) -> Config:
    """``config`` with other values; a dict changes some keys of a part."""
    found = {}
    for key, value in keys.items():
        old = getattr(config, key)
        part = isinstance(value, dict)
        found[key] = ({**old, **value} if isinstance(old, dict) else old.model_copy(update=value)) if part else value
    return config.model_copy(update=found)


def config_of(target: Path, folder: Path, arm: dict[str, Any], steps: int) -> Config:
    """peagle.yaml beside this file, for an arm in ``folder``."""
    # Of EAGLE-3 speculators' default, and that of published heads.
    more = {"norm_before_residual": True} if arm["kind"] == "eagle3" else {}
    return changed(
        read_config(Path(__file__).with_name("peagle.yaml")),
        target=str(target),
        folder=str(folder / "run"),
        data={"prompts": [str(folder / "prompts.jsonl")], "endpoint": f"http://{HOST}:{free_port()}/v1"},
        head={key: arm[key] for key in ("layers", "depths", "draft_vocab", "init")},
        optimizer={"lr": arm["muon_lr"] / 10, "steps": steps},
        every={"checkpoint": steps, "replay": steps},
        speculators={"muon_lr": arm["muon_lr"], **more},
    )


def answers(work: str, name: str, target: str, prompts: int) -> dict[str, Any]:
    """Let ``target`` answer ``prompts`` prompts and keep their hidden states, from which all its heads learn."""
    from peagle_tools.train.pipeline import do

    folder = Path(work, f"{name}-run")
    config, found = config_of(Path(work, target), folder, ARM, 1), pieces(held_out=False)[:prompts]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": piece.prompt}) + "\n" for piece in found))
    for step in ("prompts", "answers", "data", "states"):
        do(step, config)
    rows = (folder / "run/answers.jsonl").read_text().splitlines()
    return {"prompts": len(rows), "answer_tokens": sum(sum(json.loads(row)["loss_mask"]) for row in rows)}


def train_head(work: str, name: str, target: str, steps: int, **how: Any) -> dict[str, Any]:
    """Train a head on the answers of ``target``, and put what vLLM reads of it into ``work / name``.

    Args:
        how: keys in place of those of ``ARM``.

    Returns:
        ``seconds`` of the processor; ``parameters`` that are trained, and ``tflop`` of all steps, if each has as many
        operations as its first, as torch counts them; ``accuracy`` on held-out documents, of our trainer.
    """
    import torch

    from peagle_tools.train.run import train

    torch.set_num_threads(1)
    arm, place, folder = ARM | how, Path(work, name), Path(work, f"{name}-run")
    if "init" in how:
        arm["init"] = str(Path(work, how["init"]))
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    (folder / "run/data").symlink_to(Path(work, f"{target}-answers-run/run/data"))
    config, began = config_of(Path(work, target), folder, arm, steps), time.process_time()
    with counted(steps) as found:
        head = train(config).checkpointer.path / "best" if arm["kind"] == "peagle" else train_eagle3(config)
    found["seconds"] = round(time.process_time() - began)
    place.mkdir(exist_ok=True)
    shutil.copy(head / "model.safetensors", place)
    settings = json.loads((head / "config.json").read_text())
    settings["speculators_config"]["verifier"]["name_or_path"] = f"models/{target}"  # not its place here
    (place / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if arm["kind"] == "peagle":
        *_, last = (folder / "run/log.jsonl").read_text().splitlines()
        found["accuracy"] = json.loads(last)["held_out"]["accuracy"]
    shape = {key: arm[key] for key in ("kind", "layers", "muon_lr", "draft_vocab")} | {"trained_depth": arm["depths"]}
    return shape | {"seen": f"{steps:,} steps of {config.step.tokens:,} tokens"} | found


def sharpen_head(work: str, name: str, target: str, prompts: int) -> dict[str, Any]:
    """Sharpen the published P-EAGLE head of ``target``, unless a selector is no better; goes on where it was stopped.

    It is fitted to prompts that the head learned from, and measured on the held-out ones of RESULTS.json.
    """
    models, (learn, held_out) = Path(work).parent, (Path(work, f"{name}.{end}.jsonl") for end in ("learn", "held-out"))
    learn.write_text("\n".join(json.dumps({"prompt": piece.prompt}) for piece in pieces(held_out=False)[:prompts]))
    held_out.write_text("\n".join((models / "prompts/heldout.jsonl").read_text().splitlines()[:PROMPTS]))
    how = {"target": models / target, "prompts": learn, "held_out": held_out, "max_tokens": MAX_TOKENS}
    engine = {"dtype": "float32", "max_num_seqs": 128, "kv_cache_memory_bytes": 512 << 20}
    found = sharpen(models / f"{target}-peagle", Path(work, name), {}, **how, engine=json.dumps(engine))
    if not Path(work, name).is_dir():  # the old one is of another head
        shutil.rmtree(models / name, ignore_errors=True)
    return {"served": found["served"]}


@contextmanager
def counted(steps: int) -> Iterator[dict[str, Any]]:
    """Count the trained parameters, and the operations of either trainer's first step, times ``steps``."""
    from speculators.train.trainer import Trainer
    from torch.utils.flop_counter import FlopCounterMode

    found: dict[str, Any] = {}
    counter = FlopCounterMode(display=False)

    def step(trainer: Any) -> None:
        if not found:
            counter.__exit__(None, None, None)
            found["tflop"] = round(steps * counter.get_total_flops() / 1e12, 1)
            found["parameters"] = sum(w.numel() for w in trainer.model.parameters() if w.requires_grad)
        theirs(trainer)

    theirs = Trainer._optimizers_step
    counter.__enter__()
    with patch.object(Trainer, "_optimizers_step", step):
        yield found


def train_eagle3(config: Any) -> Path:
    """speculators' own command in this process, without a GPU; the folder of its head."""
    from datasets import load_from_disk
    from safetensors.torch import load_file, save_file
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    from peagle_tools.train import cpu
    from peagle_tools.train.run import to_options
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
        begin_as_target(head, config.target)
        return head

    cpu.setup()
    data, held_out = load_from_disk(str(config.data_folder)), config.data.held_out
    rows, steps = len(data), config.optimizer.steps
    flat = to_options(config).flatten() | {
        "speculator_type": "eagle3",
        "epochs": steps * config.step.tokens // sum(data["seq_len"][:-held_out]) + 1,
        "max_steps": steps,
        "train_data_ratio": (rows - held_out + 0.5) / rows,
        "max_anchors": config.step.tokens,
        "ttt_steps": config.head.depths,
        "loss_implementation": "eager",
    }
    build = cli.build_draft_model
    with patch.object(cli, "Trainer", OnCpu), patch.object(cli, "build_draft_model", begun):
        cli.main(TrainConfig.from_sources(cli=flat, argv=[]))
    head = max((config.run / "checkpoints").glob("[0-9]*"), key=lambda folder: int(folder.name))
    weights = load_file(head / "model.safetensors")
    rounded = {name: value.bfloat16() if value.is_floating_point() else value for name, value in weights.items()}
    save_file(rounded, head / "model.safetensors", {"format": "pt"})  # as ours are
    return head
