"""Hidden states that the target computes where its head is trained, and that stay in memory: no server, no files."""

from typing import Any

import psutil
import torch
from datasets import Dataset
from hs_connectors import HiddenStatesTransfer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from peagle_tools.shared.errors import ToolError
from peagle_tools.train.peagle_yaml import Config
from peagle_vllm.heads.files import one_line

MOST_TOKENS = 1 << 16  # of a forward, padding included


class StatesInMemory(HiddenStatesTransfer):
    """What speculators' data set takes the hidden states of its documents from, here those that transformers computes.

    They are on the GPU, if there is one, and as vLLM's are: [N, aux layers + 1, hidden] for the N tokens of a document,
    what enters each layer that the head reads and the last norm, in the target's dtype. ToolError where there is too
    little memory, or transformers cannot read this target or names its layers otherwise.

    Args:
        source: what the states are computed from; a later run with an equal one uses these again.
    """

    def __init__(self, config: Config, rows: Dataset, source: object):
        self.source = source
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        try:
            target = AutoModelForCausalLM.from_pretrained(config.target, dtype=getattr(torch, config.target_dtype))
            target = target.get_decoder().eval().to(device)
            layers = [*target.layers, target.norm]
        except (AttributeError, OSError, ValueError) as error:
            what = f"transformers cannot compute hidden states of {config.target} ({one_line(error, 200)})"
            raise ToolError(f"data.states: memory: {what}; write `states: files`") from None
        self.tokens = [torch.tensor(row) for row in rows.with_format(None)["input_ids"]]
        lengths = [len(row) for row in self.tokens]
        need = sum(lengths) * (len(config.aux_layers) + 1) * target.config.hidden_size * target.dtype.itemsize
        free = torch.accelerator.get_memory_info()[0] if device.type != "cpu" else psutil.virtual_memory().available
        if need > free / 2:
            what = f"hidden states take {need / 1e9:.1f} GB, more than half of the {free / 1e9:.1f} GB that are free"
            raise ToolError(f"data.states: memory: {what}; write `states: files`")
        entered: dict[int, Tensor] = {}
        read = [*config.aux_layers, len(layers) - 1]
        for number in read:
            layers[number].register_forward_pre_hook(lambda _, args, number=number: entered.update({number: args[0]}))
        self.states = [torch.empty(0)] * len(lengths)
        for batch in _batches(lengths):
            ids = pad_sequence([self.tokens[number] for number in batch], batch_first=True)
            with torch.no_grad():
                target(input_ids=ids.to(device), use_cache=False)
            for number, states in zip(batch, torch.stack([entered[layer] for layer in read], dim=2), strict=True):
                self.states[number] = states[: lengths[number]]

    def get_cached(self, file_idx: int) -> dict[str, Tensor]:
        return {"hidden_states": self.states[file_idx], "token_ids": self.tokens[file_idx]}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> None:
        """None, for no server is asked: every document is there."""


def _batches(lengths: list[int]) -> list[list[int]]:
    """Numbers of documents of like lengths, of ``MOST_TOKENS`` together."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not batches or (len(batches[-1]) + 1) * lengths[number] > MOST_TOKENS:
            batches.append([])
        batches[-1].append(number)
    return batches
