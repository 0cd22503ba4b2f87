"""An EAGLE-3 head by speculators' own trainer, from the data of a P-EAGLE head: what that is compared with."""

from functools import partial
from logging import Handler, getLogger
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import load_from_disk
from speculators.train import cli
from speculators.train.config import TrainConfig

from benchmarks.train_gpu import EAGLE3_FOLDER, changed, newest
from peagle_tools.shared.errors import TryAgain
from peagle_tools.train import cpu
from peagle_tools.train.documents import take_states
from peagle_tools.train.peagle_yaml import Config
from peagle_tools.train.trainer import note_step
from peagle_tools.train.training import to_options
from peagle_tools.train.warm_start import begin_as_target

# Of peagle.yaml, what differs from a P-EAGLE head's: the usual one layer, and speculators' default of three steps.
EAGLE3 = {"selector": None, "head": {"layers": 1, "depths": 3}, "speculators": {"norm_before_residual": True}}


def of_eagle3(config: Config) -> Config:
    """Settings of an EAGLE-3 head from the documents of this run, whose folder holds its own."""
    eagle3 = changed(config, folder=str(config.run / EAGLE3_FOLDER), **EAGLE3)
    eagle3.run.mkdir(parents=True, exist_ok=True)
    if not eagle3.data_folder.exists():
        eagle3.data_folder.symlink_to(config.data_folder)
    return eagle3


def train_eagle3(config: Config) -> Path:
    """Train as peagle.yaml says, from random weights or the target's last layer; the folder of the head.

    It continues from its last checkpoint, whose weights and moments speculators rounds to bfloat16. log.jsonl has a
    line {"step", "tokens/s", "loss", "peak_gb", "time"} for each step that is logged.
    """

    class Trainer(cli.Trainer):
        def setup_trainer(self) -> None:
            super().setup_trainer()
            if not torch.accelerator.is_available():
                self.local_rank = self.device_type = "cpu"
            self.train_loader.pin_memory = self.val_loader.pin_memory = config.data.states == "files"
            getLogger("speculators.metrics").addHandler(handler)  # speculators has cleared those that were there

        def train_epoch(self, epoch: int, **options: Any) -> None:
            if self.global_step < steps:  # else it would go on for a step in each epoch
                super().train_epoch(epoch, **options)
            reached.append(self.global_step)

    def begun(*args: Any) -> Any:
        head = build(*args).float()
        if config.head.init:
            begin_as_target(head, config.target)
        return head

    cpu.setup()
    assert config.head.init in (None, "target") and config.optimizer.steps
    data, held_out = load_from_disk(str(config.data_folder)), config.data.held_out
    rows, steps = len(data), config.optimizer.steps
    take_states(config, data)
    flat = to_options(config).flatten() | {
        "speculator_type": "eagle3",
        "epochs": steps * config.step.tokens // sum(data["seq_len"][:-held_out]) + 1,
        "max_steps": steps,
        "checkpoint_freq": 0.5,  # of an epoch
        "train_data_ratio": (rows - held_out + 0.5) / rows,
        "max_anchors": config.step.tokens,
        "ttt_steps": config.head.depths,
    }
    if torch.accelerator.is_available():
        torch._dynamo.config.recompile_limit = 64  # two runs with validations; beyond it torch does not compile
        flat["draft_attn_impl"] = "simple_flex_attention"  # the other masks are as large as a step squared
    build, reached = cli.build_draft_model, [0]
    handler = Handler()
    handler.emit = partial(note_step, config.run / "log.jsonl")  # type: ignore[method-assign]
    with patch.object(cli, "Trainer", Trainer), patch.object(cli, "build_draft_model", begun):
        cli.main(TrainConfig.from_sources(cli=flat, argv=[]))
    if reached[-1] < steps:  # a signal, after which speculators ends as if it were the end
        raise TryAgain(f"{config.run}: stopped before its {steps} steps")
    return newest(config.run)
