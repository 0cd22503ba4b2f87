"""Checkpoints of a run: ``checkpoints/step-N``, whole or not there, and enough to continue bit for bit.

speculators' checkpointers write and read weights and optimizer; here they do it in float32, into ``step-N.tmp``, which
gets its name only when everything in it is on the disk. A checkpoint holds ``model.safetensors`` and ``config.json``
(bfloat16, what vLLM loads) with an index of it, a selector in ``edge/``, ``master.safetensors`` (float32, all weights),
optimizer, schedule and ``training_state.json``.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from speculators.train.checkpointer import SingleGPUCheckpointer, convert_float_dtype, patch_config_dtype
from speculators.train.distributed import get_rank

from peagle_tools.shared.atomic_files import sync
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.selector_file import write_selector
from peagle_tools.train.selector_training import TENSORS, served
from peagle_vllm.heads.files import INDEX, one_line, read_json
from peagle_vllm.heads.head import read_head

KEPT = 3
MODEL, MASTER = "model.safetensors", "master.safetensors"  # what vLLM loads; what training continues from
STATE = "training_state.json"
REPLAYED = "replayed"  # in it: accepted drafts after each token of each held-out answer, none if not measured then


class Checkpoints(SingleGPUCheckpointer):
    """The saved steps in a folder.

    Attributes:
        state: training_state.json of the newest checkpoint; empty where there is none.
        previous_epoch: its step, which speculators' code takes for an epoch's number; -1 where there is none.
    """

    def _get_previous_epoch(self) -> int:
        if get_rank() == 0:
            for begun in self.path.glob("step-*.tmp"):
                shutil.rmtree(begun)
        states = {step: read_json(self.folder(step) / STATE) for step in self.steps()}
        self.scores: dict[int, float] = {step: state["score"] for step, state in states.items() if state["score"]}
        newest = max(states, default=-1)
        self.state: dict[str, Any] = states.get(newest, {})
        if self.state and get_rank() == 0:
            self._point_at_best()  # a run killed between its last save and this link saves nothing more
        return newest

    def steps(self) -> list[int]:
        """The steps that were saved, in ascending order."""
        names = (folder.name.removeprefix("step-") for folder in self.path.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def folder(self, step: int | str) -> Path:
        """Of a saved step, or of this name."""
        return self.path / (f"step-{step}" if isinstance(step, int) else step)

    def model_path(self, step: int | str) -> Path:
        return self.folder(step) / MASTER

    def optimizer_path(self, step: int | str) -> Path:
        return self.folder(step) / "optimizer.pt"

    def scheduler_path(self, step: int | str) -> Path:
        return self.folder(step) / "scheduler.pt"

    def write(self, model: Any, optimizers: list, schedulers: list, state: dict[str, Any]) -> None:
        """Save a step; every process calls this. ToolError where it cannot be; then nothing of it is left."""
        begun = self.folder(f"step-{state['step']}.tmp")
        try:
            self.save_checkpoint(model, optimizers, begun.name, torch.float32)
            if schedulers:
                self.save_scheduler_state_dict(schedulers, begun.name)
            if get_rank() == 0:
                self._finish(begun, state)
            if dist.is_initialized():
                dist.barrier()  # one that ends before has torchrun end the others
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(begun, ignore_errors=True)
            kept = f"; step-{self.steps()[-1]} is there" if self.steps() else ""
            why = f"cannot be written ({one_line(error)}): make room, and the same command continues{kept}"
            raise ToolError(f"{self.folder(state['step'])} {why}") from None

    def _finish(self, begun: Path, state: dict[str, Any]) -> None:
        (begun / MODEL).rename(begun / MASTER)
        weights = convert_float_dtype(load_file(begun / MASTER), torch.bfloat16)
        selector = served(*map(weights.pop, TENSORS)) if TENSORS[0] in weights else None
        save_file(weights, begun / MODEL, metadata={"format": "pt"})
        patch_config_dtype(begun / "config.json", torch.bfloat16)
        index = {"weight_map": dict.fromkeys(weights, MODEL)}  # vLLM would read the other file, too
        (begun / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        if selector:
            write_selector(begun, read_head(begun), selector)
        (begun / STATE).write_text(json.dumps(state) + "\n")
        for file in [*begun.rglob("*"), begun]:
            sync(file)
        begun.rename(self.folder(state["step"]))
        sync(self.path)
        if state["score"] is not None:
            self.scores[state["step"]] = state["score"]
        self._point_at_best()

    def _point_at_best(self) -> None:
        """``best`` is a link to the step with the highest score, or the newest; of the others the newest are kept."""
        steps, best = self.steps(), max(self.scores, key=lambda step: (self.scores[step], step), default=None)
        for old in steps[:-KEPT]:
            if old != best:
                shutil.rmtree(self.folder(old).rename(self.folder(f"step-{old}.tmp")))  # a kill must not leave half
        link = self.path / "best.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(self.folder(steps[-1] if best is None else best).name)
        link.replace(self.path / "best")
