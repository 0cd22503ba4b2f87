"""The documents that a head is trained on and their hidden states, checked before the first step."""

import json
from argparse import Namespace
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset, load_from_disk
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from safetensors import SafetensorError, safe_open
from speculators.models.eagle3.data import shift_batch
from speculators.train import dataloader
from speculators.train.data import ArrowDataset
from speculators.train.recovery import SampleUnavailable
from torch.utils.data import DataLoader

from peagle_tools.shared.errors import ToolError
from peagle_tools.train.config import STAMP, Config
from peagle_vllm.heads.target import read_target

UNSUPERVISED = 2  # first tokens of a document: the head has no state before the first, which drafts the second
OF_THE_SERVER = (
    *("vllm_endpoint", "on_missing", "request_timeout", "max_retries"),
    *("generation_validation_retries", "max_consecutive_generation_failures"),
)
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
        if start:
            data["loss_mask"] = data["loss_mask"].clone()
            data["loss_mask"][:UNSUPERVISED] = 0
        return data


def loaders(
    config: Config, args: Namespace, num_aux: int, hidden_size: int, dtype: Any
) -> tuple[DataLoader, DataLoader]:
    """Batches of packed documents, and those of the held-out ones.

    Raises:
        ToolError: the data or its hidden states do not fit the config; one line that says how to mend it.
    """
    rows = read_rows(config)
    transfer = HiddenStatesBackend.registry[config.data.backend].from_train_args(args, args.data_path)
    if not config.data.online:
        check_states(config, transfer, rows)
    dataloader._limit_worker_threads()
    found = []
    for split in ("train", "val"):
        pieces = Pieces(
            datapath=args.data_path,
            max_len=config.step.tokens,
            transfer=transfer,
            train_ratio=(len(rows) - config.data.held_out + 0.5) / len(rows),  # which speculators rounds down
            split=split,
            model=args.verifier_name_or_path,
            hidden_states_dtype=dtype,
            **{name: getattr(args, name) for name in OF_THE_SERVER},
        )
        loader = dataloader._setup_dataloader(
            pieces,
            config.step.tokens,
            hidden_size,
            num_workers=args.num_workers,
            num_target_layers=num_aux,
            prefetch_factor=args.prefetch_factor,
            preprocess=shift_batch,
            seed=config.optimizer.seed if split == "train" else 0,
        )
        found.append(loader)
    return found[0], found[1]


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
    supervised: list[int] = []
    for number, batch in enumerate(rows.with_format("arrow").select_columns("loss_mask").iter(1000)):
        begins = pc.list_slice(batch["loss_mask"].combine_chunks(), 0, UNSUPERVISED).to_pylist()
        supervised += [number * 1000 + row for row, mask in enumerate(begins) if any(mask)]
    if supervised:
        which = f"{len(supervised)} of {len(rows)} documents are supervised in their first {UNSUPERVISED} tokens"
        raise ToolError(f"{folder}: {which}, {listed(supervised)}: give them a prompt, or leave them out")
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


def check_states(config: Config, transfer: HiddenStatesTransfer, rows: Dataset) -> None:
    """Refuse hidden states of another target, other layers or another dtype, and files that are not there or cut off.

    Raises:
        ToolError: names the files.
    """
    stamp, wanted = config.data_folder / STAMP, config.stamp
    again = "; `peagle-vllm train pipeline --from states` makes them again"
    try:
        found = json.loads(stamp.read_text())
    except (OSError, ValueError):
        raise ToolError(f"{stamp}: cannot be read, so what the hidden states are of is not known{again}") from None
    if other := [name for name in wanted if found.get(name) != wanted[name]]:
        what = ", ".join(f"{name} {found.get(name)} where peagle.yaml says {wanted[name]}" for name in other)
        raise ToolError(f"{stamp}: the hidden states have {what}{again}")
    if missing := missing_states(config, rows):
        which = f"those of {len(missing)} of {len(rows)} documents are missing, cut off, or of other ones or layers"
        raise ToolError(f"{config.data_folder}/hidden_states: {which}, {listed(missing)}{again}")
    first = transfer.get_cached(0)
    assert first is not None
    dtype = str(first["hidden_states"].dtype).removeprefix("torch.")
    read_as = "bfloat16" if config.data.backend == "fp8" else config.target_dtype  # speculators reads fp8 as bfloat16
    if dtype != read_as:
        raise ToolError(f"{config.data_folder}: hidden states are {dtype}, and peagle.yaml says {read_as}{again}")


def listed(rows: list[int]) -> str:
    more = f" and {len(rows) - LISTED} more" if len(rows) > LISTED else ""
    return f"rows {', '.join(map(str, rows[:LISTED]))}{more}"
