"""The documents that a head is trained on and their hidden states, checked before the first step."""

import json
from argparse import Namespace
from inspect import signature
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from safetensors import SafetensorError, safe_open
from speculators.models.eagle3.data import shift_batch
from speculators.train import dataloader
from speculators.train.data import ArrowDataset
from speculators.train.recovery import SampleUnavailable
from torch.utils.data import DataLoader

from peagle_tools.shared.errors import ToolError
from peagle_tools.train.peagle_yaml import STAMP, Config
from peagle_vllm.heads.target import read_target

UNSUPERVISED = 2  # first tokens of a piece: the head has no state before the first, which drafts the second
AGAIN = "make them again with `peagle-vllm train pipeline --from states`"
LISTED = 8  # rows that a message names


class Pieces(ArrowDataset):
    """speculators' documents, where they are longer than ``max_len`` cut into pieces.

    Attributes:
        pieces: row in the Arrow data, first token and one past the last, of each piece.
    """

    def _compute_approx_lengths(self) -> list[int]:
        rows = enumerate(super()._compute_approx_lengths(), self.start_file_idx)
        cuts = ((row, start, length) for row, length in rows for start in range(0, length, self.max_len))
        self.pieces = [(row, start, min(start + self.max_len, length)) for row, start, length in cuts]
        return [stop - start for _, start, stop in self.pieces]

    def __len__(self) -> int:
        return len(self.pieces)

    def _get_raw_data(self, index: int) -> Any:
        row, start, stop = self.pieces[index]
        data = super()._get_raw_data(row - self.start_file_idx)
        if isinstance(data, SampleUnavailable):
            if self.on_missing == "generate":
                return data  # the server's failures are counted, and stop the run when there are many in a row
            raise ToolError(f"row {row} of the data: {data.reason}; make its hidden states again")
        data = {name: value[start:stop] for name, value in data.items()}
        data["loss_mask"] = data["loss_mask"].clone()
        data["loss_mask"][:UNSUPERVISED] = 0
        return data


def loaders(config: Config, args: Namespace, head: Any) -> tuple[DataLoader, DataLoader]:
    """Batches of packed documents, and those of the held-out ones.

    Raises:
        ToolError: the data or its hidden states do not fit the config; one line that says how to correct it.
    """
    rows = read_rows(config)
    transfer = HiddenStatesBackend.registry[config.data.backend].from_train_args(args, args.data_path)
    if not config.data.online:
        check_states(config, transfer, rows)
    dataloader.ArrowDataset = Pieces  # which speculators makes of ``args``
    given = vars(args) | {"transfer": transfer, "preprocess": shift_batch}
    given |= {"hidden_size": head.hidden_size, "num_target_layers": len(head.target_layer_ids)}
    given["hidden_states_dtype"] = getattr(torch, config.step.dtype)
    given["train_data_ratio"] = (len(rows) - config.data.held_out + 0.5) / len(rows)  # which it rounds down
    names = signature(dataloader.create_train_val_loaders).parameters
    return dataloader.create_train_val_loaders(**{name: given[name] for name in names if name in given})


def read_rows(config: Config) -> Dataset:
    """The documents, checked without their hidden states."""
    folder = config.data_folder
    try:
        rows = load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ToolError(f"{folder}: no documents ({reason}); `peagle-vllm train pipeline` makes them") from None
    if len(rows) <= config.data.held_out:
        held = f"data.held_out keeps {config.data.held_out} of them"
        raise ToolError(f"{folder}: has {len(rows)} documents, and {held}; add prompts, or keep fewer")
    config.longer_than_a_step(rows.with_format(None)["seq_len"])
    return rows


def missing_states(config: Config, rows: Dataset) -> list[int]:
    """The documents without hidden states; those of a file that is cut off, or of other documents or layers."""
    shape, found = [len(config.aux_layers) + 1, read_target(config.target).hidden_size], []
    for number, row in enumerate(rows.with_format(None).select_columns("input_ids")):
        try:
            with safe_open(config.data_folder / f"hidden_states/hs_{number}.safetensors", "pt") as opened:
                same = opened.get_tensor("token_ids").tolist() == row["input_ids"]
                fits = same and opened.get_slice("hidden_states").get_shape()[1:] == shape
        except (OSError, SafetensorError):
            fits = False
        if not fits:
            found.append(number)
    return found


def check_stamp(config: Config) -> None:
    """Refuse stored hidden states of another target, other layers, another dtype or backend than peagle.yaml's.

    Raises:
        ToolError: names what differs.
    """
    stamp = config.data_folder / STAMP
    try:
        found = json.loads(stamp.read_text())
    except (OSError, ValueError):
        raise ToolError(f"{stamp}: cannot be read, so what the hidden states are of is not known; {AGAIN}") from None
    if other := [name for name, value in config.stamp.items() if found.get(name) != value]:
        what = ", ".join(f"{name} {found.get(name)} (peagle.yaml: {config.stamp[name]})" for name in other)
        raise ToolError(f"{stamp}: the stored hidden states have {what}; put peagle.yaml back, or {AGAIN}")


def check_states(config: Config, transfer: HiddenStatesTransfer, rows: Dataset) -> None:
    """Refuse hidden states of another target, other layers or another dtype, and files that are not there or cut off.

    Raises:
        ToolError: names the files.
    """
    check_stamp(config)
    if missing := missing_states(config, rows):
        which = f"{listed(missing)} of the data have no file there, or one that is cut off, of other tokens or layers"
        remedy = "`peagle-vllm train states` makes these files again"
        raise ToolError(f"{config.data_folder}/hidden_states: {which}; {remedy}")
    first = transfer.get_cached(0)
    assert first is not None
    dtype = str(first["hidden_states"].dtype).removeprefix("torch.")
    read_as = "bfloat16" if config.data.backend == "fp8" else config.target_dtype  # speculators reads fp8 as bfloat16
    if dtype != read_as:
        raise ToolError(f"{config.data_folder}: hidden states are {dtype}, and peagle.yaml says {read_as}; {AGAIN}")


def listed(rows: list[int]) -> str:
    more = f" and {len(rows) - LISTED} more" if len(rows) > LISTED else ""
    return f"rows {', '.join(map(str, rows[:LISTED]))}{more}"
