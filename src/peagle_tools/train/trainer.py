"""speculators' trainer, whose run can be killed at any point and continues bit for bit."""

import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from logging import Handler, LogRecord, getLogger
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from speculators.train import trainer as library
from torch.utils.data import DataLoader
from tqdm import tqdm

from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.train.checkpoints import REPLAYED, Checkpoints
from peagle_tools.train.documents import listed
from peagle_tools.train.draft_model import PEagleDraftModel
from peagle_tools.train.lines import add_line, read_lines, write_lines
from peagle_tools.train.peagle_yaml import Config, decisive
from peagle_tools.train.replay import measure
from peagle_tools.train.selector_training import build_optimizers


class Trainer(library.Trainer):
    """speculators' ``Trainer`` with seeds of each step, checkpoints between steps, and one process or several."""

    def __init__(self, settings: Config, model: PEagleDraftModel, options: library.TrainerConfig, *loaders: DataLoader):
        self.settings = settings
        self.log_file = settings.run / "log.jsonl"
        self.stopping = False
        library.build_optimizers = build_optimizers
        super().__init__(model, options, *loaders)
        self.model.register_forward_pre_hook(self._seed)

    @property
    def head(self) -> PEagleDraftModel:
        return cast("PEagleDraftModel", getattr(self.model, "module", self.model))  # DistributedDataParallel wraps it

    def setup_trainer(self) -> None:
        """Where to begin: at the newest checkpoint."""
        if not torch.accelerator.is_available():
            self.local_rank = self.device_type = "cpu"  # the library has a GPU's number, and "cuda"
        self.world = dist.get_world_size() if self.is_distributed else 1
        self.checkpointer = Checkpoints(self.config.save_path)
        state = self.checkpointer.state
        self.current_epoch, self.global_step = state.get("epoch", 0), state.get("step", 0)
        self.local_step = self._resume_local_step = state.get("local_step", 0)
        if state:
            was = decisive(state["run"])
            for name, value in self._run_of().items():
                if (before := was.get(name, value)) != value:
                    what = f"step-{state['step']} is of another run: {name} was {before!r} and is {value!r}"
                    remedy = "put it back, or begin another run with another `folder`"
                    raise ToolError(f"{self.checkpointer.path}/{what}; {remedy}")

    def run(self) -> None:
        """Train to the end, or to a signal: TryAgain, and its step is saved.

        ToolError where a loss is no number, or a checkpoint cannot be written.
        """
        with self._signals(), self._log():
            for epoch in range(self.current_epoch, self.config.num_epochs):
                if self.global_step >= self.config.max_steps:
                    break
                self.train_epoch(epoch, step_callback=self._after_step)
                self.local_step = 0

    def train_epoch(self, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        self.epoch = epoch
        self.train_loader.batch_sampler.set_epoch(epoch)
        self.batches = list(self.train_loader.batch_sampler)
        super().train_epoch(epoch, step_callback=step_callback)

    def _seed(self, model: torch.nn.Module, _: Any) -> None:
        """What a step samples depends on its number only, so that a resumed run samples the same."""
        step = self.global_step * self.world + self.rank if model.training else 0
        torch.manual_seed(self.settings.optimizer.seed + step)

    def _optimizers_step(self) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if not norm.isfinite():
            rows = listed(sorted(self.batches[self.local_step]))  # those that are trained on are the first ones
            saved = self.checkpointer.steps()
            kept = f"step-{saved[-1]} is kept" if saved else "nothing was saved"
            remedy = "Look at their hidden states, or lower optimizer.lr"
            what = f"the loss or its gradient is no number, with {rows} of the data"
            raise ToolError(f"step {self.global_step + 1}: {what}; {kept}. {remedy}")
        super()._optimizers_step()
        self._optimizers_zero_grad()  # the library does it once forward has run, which most of a step's memory is for

    def _after_step(self) -> None:
        self.local_step += 1
        self.bar.update()
        last, every = self.global_step == self.config.max_steps, self.settings.every
        stopping, measured = self._any_stopping(), last or self.global_step % every.replay == 0
        if measured or stopping or self.global_step % every.checkpoint == 0:
            state = {"step": self.global_step, "epoch": self.epoch, "local_step": self.local_step}
            score, replayed = self._measure() if measured else (None, None)
            state |= {"score": score, REPLAYED: replayed, "run": self._run_of()}
            self.checkpointer.write(self.model, self.optimizers, self.schedulers, state)
        if stopping and not last:
            raise TryAgain(f"stopped after step {self.global_step}, which is saved; the same command continues")

    def _any_stopping(self) -> bool:
        """Whether a signal came to one of the processes: they reach the same step before they save it."""
        if not self.is_distributed:
            return self.stopping
        flag = torch.tensor(float(self.stopping), device=self.head.fc.weight.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _measure(self) -> tuple[float, list[list[int]]]:
        """``measure`` of the head, whose AL decides which one is the best; its held-out loss goes to the log."""
        metrics = self.val_epoch(self.epoch) or {}
        if self.rank == 0:
            add_line(self.log_file, {"step": self.global_step, "held_out": _shown(metrics, "_epoch")})
        # In float32, a GPU's attention has no kernel for grouped heads, and holds all scores of a document at once.
        with torch.autocast(self.device_type, self.config.hidden_states_dtype, enabled=self.device_type != "cpu"):
            measured = measure(self.settings, self.head, self.val_loader.dataset, self.global_step)
        self.model.train()
        return measured

    def _run_of(self) -> dict[str, Any]:
        """What decides the weights of this run."""
        documents = self.train_loader.dataset
        lengths = sha256(str([*documents.approx_lengths]).encode()).hexdigest()[:16]
        counts = {"documents": len(documents), "lengths of documents": lengths, "processes": self.world}
        return {**self.settings.training, **counts}

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGTERM or SIGINT stops the run at its next step; of one process, the second one at once."""

        def stop(number: int, _: Any) -> None:
            self.stopping = True
            if not self.is_distributed:  # torchrun passes on what all processes got already
                signal.signal(number, before[number])

        before: dict[int, Any] = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _log(self) -> Iterator[None]:
        """The library's metrics of a step as a line of log.jsonl, and a bar with the time that is left."""
        library.tqdm = lambda loader, **_: loader  # the library's bar, which knows an epoch only
        begun, is_first = self.global_step, self.rank == 0
        self.bar = tqdm(total=self.config.max_steps, initial=begun, unit="step", mininterval=1, disable=not is_first)
        handler, logger = Handler(), getLogger("speculators.metrics")
        handler.emit = self._note_step  # type: ignore[method-assign]
        if is_first:
            lines = read_lines(self.log_file, must_exist=False)
            write_lines(self.log_file, [line for line in lines if line["step"] <= begun])  # later ones are run again
            logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            self.bar.close()

    def _note_step(self, record: LogRecord) -> None:
        if line := note_step(self.log_file, record, self.world):
            self.bar.set_postfix({key: line[key] for key in ("loss", "tokens/s", "peak_gb")}, refresh=False)


def note_step(file: Path, record: LogRecord, processes: int = 1) -> dict[str, Any]:
    """Write what speculators' trainer logs of a step; its line, empty for any other record."""
    if not isinstance(record.msg, dict) or "train" not in record.msg:
        return {}
    line = {"step": record.msg["global_step"] + 1, "lr": record.msg["lr"], **_shown(record.msg["train"])}
    profile = record.msg["profile"]
    line["tokens/s"] = round(profile["tokens_per_s"] * processes)
    line["ms"] = {name: round(profile[f"{name}_ms"]) for name in ("queue", "h2d", "fwd", "bwd", "opt")}
    line["peak_gb"] = round(peak_memory() / 2**30, 2)
    line["time"] = round(time.time(), 2)
    add_line(file, line)
    return line


def _shown(metrics: dict[str, float], end: str = "") -> dict[str, Any]:
    """Losses, and accuracy by depth, of speculators' metrics, whose names have ``end``."""
    line: dict[str, Any] = {key: metrics[key + end] for key in ("loss", "selector_loss") if key + end in metrics}
    depths = [name for name in metrics if name.startswith("position_") and name.endswith(f"_acc{end}")]
    return line | {"accuracy": [round(metrics[name], 4) for name in depths]}


def peak_memory() -> int:
    """Bytes that this process used at most: of the accelerator, where there is one."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
