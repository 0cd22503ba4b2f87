"""Heads of the real target: settings that differ, and EAGLE-3 by speculators' own trainer."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from peagle_tools.train.config import Config


def changed(config: Config, **keys: Any) -> Config:
    """``config`` with other values; a dict changes some keys of a part."""
    found = {}
    for key, value in keys.items():
        old = getattr(config, key)
        part = isinstance(value, dict)
        found[key] = ({**old, **value} if isinstance(old, dict) else old.model_copy(update=value)) if part else value
    return config.model_copy(update=found)


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
