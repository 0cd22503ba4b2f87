"""Every check of a head, in one walk: alone (``check_head``), and for a target (``check_pair``).

No weight is loaded for them; ``serving.check_loaded_head`` sees what only the loaded head shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from peagle_vllm.heads.check_config import check_architecture, check_fields, check_mask_token
from peagle_vllm.heads.check_weights import check_fc, check_layers, check_mask_hidden, check_norms, check_shapes
from peagle_vllm.heads.config import AUX_KEY, default_aux_layers, is_whole
from peagle_vllm.heads.edge import edge_faults
from peagle_vllm.heads.files import HeadError, as_line, shown
from peagle_vllm.heads.head import Head
from peagle_vllm.heads.target import Target
from peagle_vllm.heads.vocabulary import check_vocabulary


@dataclass(frozen=True)
class Problem:
    """One line for the user: what is wrong, where, how to mend it. A warning does not stop serving."""

    line: str
    severity: Literal["error", "warning"] = "error"

    def __post_init__(self) -> None:
        object.__setattr__(self, "line", as_line(self.line))


def check_head(head: Head) -> list[Problem]:
    """Problems of a P-EAGLE head, the most telling first; empty for a sound one."""
    if head.is_eagle3:
        return [
            Problem(
                f"{head.name} is no P-EAGLE head (an EAGLE-3 head, perhaps): it has neither mask_hidden nor a mask "
                'token id; remove "parallel_drafting": true from the speculative config, or name a P-EAGLE head'
            )
        ]
    fields = list(check_fields(head))
    lines = [*check_architecture(head), *check_mask_token(head), *fields]
    if head.tensors:
        layers = list(check_layers(head))
        lines += layers
        try:
            for check in (check_fc, check_mask_hidden, check_norms, check_vocabulary):
                lines += check(head)
        except HeadError as error:
            lines.append(str(error))
        if head.family and not head.is_quantized and not fields and not layers:  # else shapes cannot be known
            lines += check_shapes(head)
    return [Problem(line) for line in lines]


def check_presence(head: Head) -> list[Problem]:
    """What a tool needs and a dummy load does not: weights."""
    if head.tensors:
        return []
    return [Problem(f"no *.safetensors: {head.name}; pickled weights are never read, save them as such")]


def check_pair(head: Head, target: Target, *, num_speculative_tokens: object = None) -> list[Problem]:
    """What is wrong with serving ``head`` for ``target`` as P-EAGLE; empty when all is well.

    Args:
        num_speculative_tokens: K, as the user gave it; None where it is left to the head.
    """
    problems: list[Problem] = []
    if num_speculative_tokens is not None:
        problems += [Problem(line) for line in num_tokens_faults(num_speculative_tokens)]
    if not head.is_eagle3:
        problems += [Problem(line) for line in _sizes(head, target)]
        problems += _aux_layers(head, target)
        problems += [Problem(line) for line in edge_faults(head, target.vocab_size)]
    return problems + check_head(head)


def num_tokens_faults(value: object) -> Iterator[str]:
    """What is wrong with K, as the user gave it."""
    if not is_whole(value) or value <= 0:
        yield (
            f"num_speculative_tokens is {shown(value)}, needs a whole number above 0: the speculative config; set it "
            "to 5, for example"
        )


def _sizes(head: Head, target: Target) -> Iterator[str]:
    if head.target_hidden_size != target.hidden_size:
        key = "target_hidden_size" if head.served.get("target_hidden_size") else "hidden_size"
        yield (
            f"{key} is {head.target_hidden_size}, {target.name} has hidden states {target.hidden_size} wide: "
            f"{head.config_file}; use the head that was trained for this target"
        )
    if head.vocab_size != target.vocab_size:
        yield (
            f"vocab_size is {head.vocab_size}, {target.name} has {target.vocab_size}: {head.config_file}; use the "
            "head that was trained for this target"
        )
    if head.tensors and head.hidden_size != target.hidden_size:
        for part in ("embed_tokens", "lm_head"):
            if not head.has(part):
                yield (
                    f"{part} is missing, and that of {target.name} is {target.hidden_size} wide where the head's "
                    f"hidden_size is {head.hidden_size}: {head.file_of(part)}; take the head's weights from their "
                    "source again"
                )


def _aux_layers(head: Head, target: Target) -> Iterator[Problem]:
    default = default_aux_layers(target.num_layers)
    ids, key, needed, file = head.aux_layer_ids, head.aux_key, head.aux_needed, head.config_file
    if ids is None:
        fault = None
        if len(set(default)) < len(default):
            fault = "names one twice"
        elif not all(0 <= i <= target.num_layers for i in default):
            fault = "leaves the target"
        elif len(default) != needed:
            fault = f"has {len(default)} where fc takes {needed}"
        if fault:
            yield Problem(
                f"no aux layers are named, and vLLM's default for the {target.num_layers} layers of {target.name}, "
                f'{list(default)}, {fault}: {file}; add "{AUX_KEY}" with the {needed} that the head was trained on'
            )
        return
    if len(set(ids)) < len(ids):
        repeated = next(i for i in ids if ids.count(i) > 1)
        yield Problem(
            f"{key} names layer {repeated} twice ({shown(ids)}), vLLM captures it once: {file}; name {needed} "
            "different layers, those that the head was trained on"
        )
    outside = [i for i in ids if not 0 <= i <= target.num_layers]
    if outside:
        yield Problem(
            f"{key} names layer {shown(outside[0])}, {target.name} has {target.num_layers} layers (0 to "
            f"{target.num_layers} can be read): {file}; use the head that was trained for this target"
        )
    if len(ids) != needed:
        yield Problem(
            f"{key} names {len(ids)} layers, fc takes {needed} aux hidden states: {file}; name the layers that the "
            "head was trained on"
        )
    if tuple(ids) == tuple(i - 1 for i in default):
        yield Problem(
            f"{key} is {shown(ids)}, one less than vLLM's default {list(default)}: {file}; SpecForge and SGLang count "
            "the layer whose output is read, vLLM the one whose input: add one to each if the head was trained so "
            "(peagle-vllm diagnose tries it)",
            "warning",
        )
    if list(ids) != sorted(ids):
        yield Problem(
            f"{key} is {shown(ids)}, vLLM hands them to the head in ascending order: {file}; drafts are poor if the "
            "head was trained on the order named",
            "warning",
        )
