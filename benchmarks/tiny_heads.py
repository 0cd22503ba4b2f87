"""How heads of the tiny targets are trained: from prompts to a checkpoint, by this package's trainer or speculators'.

The recipe in models/, ``compare_heads`` and ``train_tiny`` share it. Every head begins as its target's last layers.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from benchmarks import arms

MODELS = arms.ROOT / "models"
PROMPTS = 48  # that AL is measured on, and documents that are held out of training
STEP_TOKENS = 1024
GAMMA, TOP = 0.8, 32


@dataclass(frozen=True)
class Arm:
    """How a head is trained.

    Attributes:
        loss: speculators' name of it.
        weighted: a row of depth d counts GAMMA^d.
        top: of the target's distribution, the TOP likeliest tokens only.
        by: our trainer, or speculators' own.
        depths: that P-EAGLE drafts at once, or steps that EAGLE-3 is trained to go on alone.
        muon_lr: peak learning rate of the matrices; AdamW's, of all else, is a tenth of it.
        init: ``target``, or a finished head.
    """

    loss: str = "kl_div"
    weighted: bool = False
    top: bool = False
    by: str = "ours"
    kind: str = "peagle"
    layers: int = 4
    depths: int = 8
    muon_lr: float = 0.01
    draft_vocab: int | None = None
    init: str = "target"


AS_SHIPPED = Arm('{"kl_div": 0.5, "ce": 0.5}')  # the loss of the heads in models/
# The layers and rates of EAGLE-3 are those of RESULTS.json: about as many operations a token, and of the rates 0.01,
# 0.02 and 0.04 the best after 200 steps.
EAGLE3 = Arm(by="speculators", kind="eagle3", layers=1, muon_lr=0.04)


def write_config(target: str, folder: Path, arm: Arm, seed: int, steps: int, port: int = 8377) -> Path:
    """peagle.yaml of an arm in ``folder``; ``target`` is a folder of models/, or any other's path."""
    settings: dict[str, Any] = {
        "target": str(MODELS / target),
        "data": {
            "prompts": ["prompts.jsonl"],
            "held_out": PROMPTS,
            "max_tokens": 128,
            "endpoint": f"http://127.0.0.1:{port}/v1",
        },
        "head": {
            "layers": arm.layers,
            "depths": arm.depths,
            "draft_vocab": arm.draft_vocab,
            "aux_layers": [2, 5, 7],
            "mask_token": 6,
            "init": arm.init,
        },
        "step": {"tokens": STEP_TOKENS, "cod": [0.7, 0.2], "dtype": "float32"},
        "optimizer": {"name": "muon", "lr": arm.muon_lr / 10, "steps": steps, "seed": seed},
        "every": {"checkpoint": steps, "replay": steps},
        "engine": {
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 64,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**29,
        },
        "speculators": {"num_workers": 0, "muon_lr": arm.muon_lr, "loss_fn": arm.loss},
    }
    if arm.kind == "eagle3":
        settings["speculators"]["norm_before_residual"] = True  # speculators' default, and that of published heads
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "peagle.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def write_prompts(folder: Path, count: int) -> Path:
    """``count`` of the prompts that the tiny models have always been trained on; AL is measured on other ones."""
    sys.path.append(str(MODELS / "recipe"))
    from corpus import pieces
    from plan import SEED

    found = pieces(held_out=False, seed=SEED)[:count]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": piece.prompt}) + "\n" for piece in found))
    return file


def make_data(target: str, folder: Path, count: int, port: int = 8377) -> Path:
    """The target's answers to ``count`` prompts and their hidden states, for all arms; their folder."""
    file = write_config(target, folder, AS_SHIPPED, 0, 1, port)
    prompts, out = write_prompts(folder, count), folder / "run/prompts.jsonl"
    for words in (
        ["prompts", prompts, "--pii", "none", "--out", out],
        ["answers", file],
        ["data", file],
        ["states", file],
    ):
        subprocess.run([sys.executable, "-m", "peagle_vllm.cli", "train", *map(str, words)], check=True)
    return folder / "run/data"


def train(target: str, arm: dict[str, Any], seed: int, steps: int, data: str, folder: str) -> dict[str, Any]:
    """Train a head in this process.

    Returns:
        ``head``: its folder; ``seconds`` of the processor; of a run that was not finished before, ``parameters`` that
        are trained, and ``tflop`` of all steps, if each has as many operations as its first, as torch counts them.
    """
    import torch

    from peagle_vllm.train.config import read_config
    from peagle_vllm.train.run import train as train_ours

    torch.set_num_threads(1)
    how = Arm(**arm)
    file = write_config(target, Path(folder), how, seed, steps)
    (file.parent / "run").mkdir(exist_ok=True)
    if not (link := file.parent / "run/data").exists():
        link.symlink_to(data)
    config, began = read_config(file), time.process_time()
    with loss_of(how), counted(steps) as found:
        head = train_ours(config).checkpointer.path / "best" if how.by == "ours" else train_theirs(config, how)
    return {"head": str(head), "seconds": round(time.process_time() - began), **found}


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


@contextmanager
def loss_of(arm: Arm) -> Iterator[None]:
    """Losses that speculators has not: each of its own, of a row's depth or of some of the target's tokens."""
    from peagle_vllm.train import head

    def metrics(logits: Any, targets: Any, mask: Any, anchor: Any, depth: Any, num: int, losses: Any) -> Any:
        least = targets.topk(TOP).values[..., -1:]
        weight = GAMMA**depth if arm.weighted else 1

        def changed(loss: Any) -> Any:
            of = targets.masked_fill(targets < least, float("-inf")) if arm.top else targets
            return lambda logits, _: loss(logits, of) * weight

        changed_losses = {name: (changed(loss), share) for name, (loss, share) in losses.items()}
        return theirs(logits, targets, mask, anchor, depth, num, changed_losses)

    theirs = head.compute_metrics
    with patch.object(head, "compute_metrics", metrics) if arm.weighted or arm.top else ExitStack():
        yield


def train_theirs(config: Any, arm: Arm) -> Path:
    """speculators' own command in this process, without a GPU; the folder of its head."""
    from datasets import load_from_disk
    from safetensors.torch import load_file, save_file
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    from peagle_vllm.train import cpu
    from peagle_vllm.train.run import to_options
    from peagle_vllm.train.warm_start import begin_as_target

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
    data = load_from_disk(str(config.data_folder))
    rows, steps = len(data), config.optimizer.steps
    flat = to_options(config).flatten() | {
        "speculator_type": arm.kind,
        "epochs": steps * STEP_TOKENS // sum(data["seq_len"]) + 1,
        "max_steps": steps,
        "train_data_ratio": (rows - PROMPTS + 0.5) / rows,
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
