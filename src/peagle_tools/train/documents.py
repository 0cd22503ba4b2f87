"""The documents that a head is trained on and their hidden states, checked before the first step."""

import gc
import json
import os
import signal
import threading
from argparse import Namespace
from functools import partial
from inspect import signature
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from safetensors import SafetensorError, safe_open
from speculators.models.eagle3.data import shift_batch
from speculators.train import dataloader
from speculators.train.data import ArrowDataset
from speculators.train.recovery import SampleUnavailable
from torch.utils.data import DataLoader

from peagle_tools.shared.errors import ToolError
from peagle_tools.train.memory_states import StatesInMemory
from peagle_tools.train.peagle_yaml import STAMP, Config
from peagle_vllm.heads.target import read_target

UNSUPERVISED = 2  # first tokens of a document: the head has no state before the first, which drafts the second
LISTED = 8  # rows that a message names


class SupervisedRows(ArrowDataset):
    """speculators' documents; their first tokens are not supervised, and one without hidden states ends the run."""

    def _get_raw_data(self, index: int) -> Any:
        data = super()._get_raw_data(index)
        if isinstance(data, SampleUnavailable):
            where = f"row {self.start_file_idx + index} of the data"
            raise ToolError(f"{where}: {data.reason}; make its hidden states again")
        data["loss_mask"] = data["loss_mask"].clone()
        data["loss_mask"][:UNSUPERVISED] = 0
        return data


class RowsInMemory(SupervisedRows):
    """The documents where ``data.states`` is ``memory``: a step reads no file."""

    def __init__(self, states: StatesInMemory, **options: Any):
        super().__init__(**options | {"transfer": states})
        self.data: Any = [*self.data.select_columns(["input_ids", "loss_mask"])]


def loaders(config: Config, args: Namespace, head: Any) -> tuple[DataLoader, DataLoader]:
    """Batches of packed documents, and of the held-out ones. ToolError where they or their states do not fit."""
    rows = read_rows(config)
    take_states(config, rows)
    options = vars(args) | {
        "preprocess": shift_batch,
        "hidden_size": head.hidden_size,
        "num_target_layers": len(head.target_layer_ids),
        "hidden_states_dtype": getattr(torch, config.step.dtype),
        "train_data_ratio": (len(rows) - config.data.held_out + 0.5) / len(rows),  # which it rounds down
    }
    names = signature(dataloader.create_train_val_loaders).parameters
    pair = dataloader.create_train_val_loaders(**{name: options[name] for name in names if name in options})
    for loader in pair:
        loader.pin_memory = config.data.states == "files"
        loader.worker_init_fn = _stay  # the library's would begin CUDA in each
    return pair


def _stay(number: int) -> None:
    """Of a loading process: a signal to all of a run's processes, such as Ctrl+C, leaves it while the step is saved.

    Only the trainer ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # also of the threads that begin after this

    def end_with_trainer() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=end_with_trainer, daemon=True).start()


def take_states(config: Config, rows: Dataset) -> None:
    """Give the loaders that speculators makes next the hidden states of ``rows``. ToolError where none fit."""
    if config.data.states == "memory":
        source, kept = (config.data_folder.resolve(), config.stamp), dataloader.ArrowDataset
        if not isinstance(kept, partial) or kept.args[0].source != source:
            del kept
            free_states()
            dataloader.ArrowDataset = partial(RowsInMemory, StatesInMemory(config, rows, source))
        return
    check_stamp(config)
    if missing := missing_states(config, rows):
        which = f"{listed(missing)} of the data have no file there, or one that is cut off, of other tokens or layers"
        remedy = "`peagle-vllm train states` makes these files again"
        raise ToolError(f"{config.data_folder}/hidden_states: {which}; {remedy}")
    dataloader.ArrowDataset = SupervisedRows


def free_states() -> None:
    """Give back the memory of hidden states that another run in this process would have used again."""
    dataloader.ArrowDataset = SupervisedRows
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def read_rows(config: Config) -> Dataset:
    """The documents, checked without their hidden states.

    ToolError where they cannot be read, all are held out, or some are longer than a step.
    """
    folder = config.data_folder
    try:
        rows = load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ToolError(f"{folder}: no documents ({reason}); `peagle-vllm train pipeline` makes them") from None
    if len(rows) <= config.data.held_out:
        held = f"data.held_out keeps {config.data.held_out} of them"
        raise ToolError(f"{folder}: has {len(rows)} documents, and {held}; add prompts, or keep fewer")
    tokens = config.step.tokens
    if longer := [length for length in rows.with_format(None)["seq_len"] if length > tokens]:
        which = f"{len(longer)} of {len(rows)} documents have more than step.tokens ({tokens}) tokens"
        raise ToolError(f"{which}, the longest {max(longer)}: raise step.tokens")
    return rows


def missing_states(config: Config, rows: Dataset) -> list[int]:
    """The documents without hidden states; those of a file that is cut off, or of other documents or layers."""
    shape = [len(config.aux_layers) + 1, read_target(config.target).hidden_size]

    def fits(number: int, tokens: list[int]) -> bool:
        try:
            with safe_open(config.data_folder / f"hidden_states/hs_{number}.safetensors", "pt") as file:
                same_tokens = file.get_tensor("token_ids").tolist() == tokens
                return same_tokens and file.get_slice("hidden_states").get_shape()[1:] == shape
        except (OSError, SafetensorError):
            return False

    documents = enumerate(rows.with_format(None).select_columns("input_ids"))
    return [number for number, row in documents if not fits(number, row["input_ids"])]


def check_stamp(config: Config) -> None:
    """Refuse stored hidden states whose target's name, layers or dtype are not peagle.yaml's: ToolError."""
    file = config.data_folder / STAMP
    stored = json.loads(file.read_text()) if file.exists() else "unknown"
    if stored != config.stamp:
        again = "make them again with `peagle-vllm train pipeline --from states`"
        what = f"hidden states of {stored}, where peagle.yaml has {config.stamp}"
        raise ToolError(f"{file}: {what}; put peagle.yaml back, or {again}")


def listed(rows: list[int]) -> str:
    more = f" and {len(rows) - LISTED} more" if len(rows) > LISTED else ""
    return f"rows {', '.join(map(str, rows[:LISTED]))}{more}"
