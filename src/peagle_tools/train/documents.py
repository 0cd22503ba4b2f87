"""The documents that a head is trained on and their hidden states, checked before the first step."""

import json
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, load_from_disk
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from speculators.data_generation.offline import find_corrupt_hidden_state_indices, get_existing_hidden_state_indices
from speculators.models.eagle3.data import shift_batch
from speculators.train import dataloader
from speculators.train.data import ArrowDataset
from speculators.train.recovery import SampleUnavailable
from torch.utils.data import DataLoader

from peagle_tools.train import TrainError
from peagle_tools.train.config import STAMP, Config
from peagle_tools.train.shards import Shards

UNSUPERVISED = 2  # first tokens of a document: the head has no state before the first, which drafts the second
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
            raise TrainError(f"row {row} of the data: {data.reason}; make its hidden states again")
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
        TrainError: the data or its hidden states do not fit the config; one line that says how to mend it.
    """
    rows = read_rows(config)
    transfer = HiddenStatesBackend.registry[config.data.backend].from_train_args(args, args.data_path)
    if not config.data.online:
        check_states(config, transfer, len(rows), num_aux, hidden_size)
    dataloader._limit_worker_threads()
    found = []
    for split in ("train", "val"):
        pieces = Pieces(
            datapath=args.data_path,
            max_len=config.step.tokens,
            transfer=transfer,
            vllm_endpoint=args.vllm_endpoint,
            on_missing=args.on_missing,
            train_ratio=(len(rows) - config.data.held_out + 0.5) / len(rows),  # which speculators rounds down
            split=split,
            model=args.verifier_name_or_path,
            hidden_states_dtype=dtype,
            request_timeout=args.request_timeout,
            max_retries=args.max_retries,
            generation_validation_retries=args.generation_validation_retries,
            max_consecutive_generation_failures=args.max_consecutive_generation_failures,
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
    set_epoch(found[0], 0, config)  # the sampler keeps the batches that its length is first asked of
    return found[0], found[1]


def set_epoch(loader: DataLoader, epoch: int, config: Config) -> None:
    """Let ``loader`` give the batches of ``epoch``, the same in every process and after every stop.

    Raises:
        TrainError: the documents do not allow ``data.mix``.
    """
    sampler: Any = loader.batch_sampler
    sampler.set_epoch(epoch)
    if config.data.mix:
        sampler.valid_indices = mixed(sampler.lengths, config.data.mix, config.optimizer.seed, epoch)


def mixed(lengths: np.ndarray, mix: dict[int, float], seed: int, epoch: int) -> np.ndarray:
    """Numbers of the documents that an epoch takes, some of them repeatedly, as ``data.mix`` wants it.

    An epoch has as many tokens as all documents together. The documents of a range stand in a line without an end,
    round after round, each round in an order of its own. An epoch takes those that end in its part of the line: so a
    share is met but for less than a document, and over the epochs all documents of a range are used equally often.

    Args:
        lengths: tokens of each document, [documents].

    Raises:
        TrainError: a document is longer than every range, or a range that has a share has no document.
    """
    if len(longer := lengths[lengths > max(mix)]):
        which = f"{len(longer)} of {len(lengths)} documents have more than {max(mix)} tokens"
        raise TrainError(f"data.mix: {which}, the longest {max(longer)}: add a range for them, its share may be 0")
    found = []
    for below, bound in pairwise([0, *sorted(mix)]):
        rows, part = np.flatnonzero((lengths > below) & (lengths <= bound)), mix[bound] * lengths.sum()
        if part and not len(rows):
            raise TrainError(f"data.mix: no document has {below + 1} to {bound} tokens: give their share to others")
        if part:
            begin, end, a_round = epoch * part, (epoch + 1) * part, lengths[rows].sum()
            rounds = range(int(begin // a_round), int(end // a_round) + 1)
            line = np.concatenate([np.random.default_rng([seed, bound, number]).permutation(rows) for number in rounds])
            ends = rounds[0] * a_round + lengths[line].cumsum()
            found.append(line[(ends > begin) & (ends <= end)])
    return np.concatenate(found)


def read_rows(config: Config) -> Dataset:
    """The documents, checked without their hidden states."""
    folder = config.data_folder
    try:
        rows = load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise TrainError(f"{folder}: no documents ({reason}); `peagle-vllm train pipeline` makes them") from None
    if len(rows) <= config.data.held_out:
        all_rows = f"{folder}: has {len(rows)} documents"
        raise TrainError(
            f"{all_rows}, and data.held_out keeps {config.data.held_out} of them; add prompts, or keep fewer"
        )
    lengths = rows.with_format(None)["seq_len"]
    config.longer_than_a_step(lengths)
    if config.data.mix:
        learned, most = lengths[: -config.data.held_out], config.step.tokens
        pieces = [min(most, length - start) for length in learned for start in range(0, length, most)]
        mixed(np.array(pieces), config.data.mix, 0, 0)
    supervised: list[int] = []
    for number, batch in enumerate(rows.with_format("arrow").select_columns("loss_mask").iter(1000)):
        begins = pc.list_slice(batch["loss_mask"].combine_chunks(), 0, UNSUPERVISED).to_pylist()
        supervised += [number * 1000 + row for row, mask in enumerate(begins) if any(mask)]
    if supervised:
        which = f"{len(supervised)} of {len(rows)} documents are supervised in their first {UNSUPERVISED} tokens"
        raise TrainError(f"{folder}: {which}, {listed(supervised)}: give them a prompt, or leave them out")
    return rows


def check_states(config: Config, transfer: HiddenStatesTransfer, rows: int, num_aux: int, hidden_size: int) -> None:
    """Refuse hidden states of another target, other layers or another dtype, and files that are not there or cut off.

    Raises:
        TrainError: names the files.
    """
    stamp, wanted = config.data_folder / STAMP, config.stamp
    again = "; `peagle-vllm train pipeline --from states` makes them again"
    try:
        found = json.loads(stamp.read_text())
    except (OSError, ValueError):
        raise TrainError(f"{stamp}: cannot be read, so what the hidden states are of is not known{again}") from None
    if other := [name for name in wanted if found.get(name) != wanted[name]]:
        what = ", ".join(f"{name} {found.get(name)} where peagle.yaml says {wanted[name]}" for name in other)
        raise TrainError(f"{stamp}: the hidden states have {what}{again}")
    if isinstance(folder := getattr(transfer, "hidden_states_path", None), Path):
        there = get_existing_hidden_state_indices(folder)
        stored = transfer.whole() if isinstance(transfer, Shards) else set()
        missing = set(range(rows)) - set(there) - stored
        if broken := sorted({*missing, *find_corrupt_hidden_state_indices(folder, there)}):
            which = f"{len(broken)} of {rows} files of hidden states are missing or cut off"
            raise TrainError(f"{folder}: {which}, {listed(broken)}{again}")
    if (first := transfer.get_cached(0)) is None:
        raise TrainError(f"{config.data_folder}: has no hidden states of row 0{again}")
    shape, dtype = tuple(first["hidden_states"].shape[1:]), str(first["hidden_states"].dtype).removeprefix("torch.")
    read_as = "bfloat16" if config.data.backend == "fp8" else config.target_dtype  # speculators reads fp8 as bfloat16
    if shape != (num_aux + 1, hidden_size) or dtype != read_as:
        is_now, needed = f"{shape}, {dtype}", f"{(num_aux + 1, hidden_size)}, {read_as}"
        raise TrainError(
            f"{config.data_folder}: a token's hidden states are {is_now}, and the head reads {needed}{again}"
        )


def listed(rows: list[int]) -> str:
    more = f" and {len(rows) - LISTED} more" if len(rows) > LISTED else ""
    return f"rows {', '.join(map(str, rows[:LISTED]))}{more}"
