"""What a head is, as far as its files show: ``read_head`` is the one place that makes a ``Head`` of a checkpoint.

Its vocabulary's map: vLLM adds ``d2t`` to the draft id, so target id = draft id + d2t[draft id]. A head without the map
drafts the first ids of the target's vocabulary, and one that holds target ids themselves drafts others; vLLM reports
neither. ``t2d`` marks the target ids that can be drafted; vLLM does not read it, but it shows which form ``d2t`` has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from peagle_vllm.heads import config as configs
from peagle_vllm.heads import files
from peagle_vllm.heads.files import INTEGERS, NUMPY, HeadError, HeadFiles, TensorInfo

NO_HEAD = "is a target, not a head; name a head, and this model as the target"
AGAIN = "take the head's weights from their source again"


@dataclass(frozen=True)
class Head:
    """A head checkpoint, read and not yet checked."""

    name: str  # the folder or hub id it was read from
    folder: Path | None  # where its files are; None when only their headers were fetched
    commit: str | None  # on the hub; None where it is not known
    config: Mapping[str, Any]  # config.json as it stands
    served: Mapping[str, Any]  # the flat config that it is served with (``config.flat_config``)
    architecture: str | None  # the class name that vLLM looks up; None where it finds none
    family: configs.Family | None  # vLLM's classes that can draft in parallel; None for any other
    num_layers: int
    hidden_size: int
    target_hidden_size: int  # width of the target's hidden states
    vocab_size: int
    draft_vocab_size: int  # rows of lm_head; ``vocab_size`` when the config names none
    aux_layer_ids: tuple[int, ...] | None  # layer n: the residual that enters it; None: vLLM's default
    aux_key: str | None  # the config field they came from
    num_aux: int  # aux hidden states that vLLM builds ``fc`` for
    mask_token_id: object  # as it stands in the config, so not always a whole number; None when there is none
    mask_token_key: str | None  # the config field it came from
    trained_depth: int | None  # tokens drafted ahead in training; None when the config has no such field
    tensors: Mapping[str, TensorInfo]  # by vLLM's names (``config.vllm_name``); empty without safetensors files

    @property
    def config_file(self) -> str:
        return f"{self.name}/config.json"

    @property
    def layer_place(self) -> str:
        """Where the fields of the decoder layers stand, for messages."""
        return f"transformer_layer_config of {self.config_file}" if self.is_speculators else self.config_file

    @property
    def is_speculators(self) -> bool:
        return configs.is_speculators(self.config)

    @property
    def is_quantized(self) -> bool:
        return configs.is_quantized(self.served)

    @property
    def is_reduced(self) -> bool:
        """Whether it drafts only a part of the target's vocabulary."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def kind(self) -> Literal["peagle", "eagle3", "target"]:
        """Without anything of P-EAGLE it is an EAGLE-3 head; without ``fc``, which every head has, a plain model."""
        if not self.tensors or "mask_hidden" in self.tensors or self.mask_token_id is not None:
            return "peagle"
        return "eagle3" if self.has("fc") else "target"

    @property
    def aux_needed(self) -> int:
        """Aux hidden states that ``fc`` takes, by its shape if possible, else as vLLM counts them."""
        return configs.aux_of_fc(self.served, self.tensors) or self.num_aux

    @property
    def head_dim(self) -> int:
        """Width of one attention head, with transformers' default for a flat Qwen3 config."""
        defaulted = self.served.get("model_type") == "qwen3" and not self.is_speculators
        stated = self.served.get("head_dim")
        return stated or (128 if defaulted else self.hidden_size // self.served["num_attention_heads"])

    @property
    def norms(self) -> dict[str, bool]:
        """The norms that a head may have or not, as vLLM reads them."""
        eagle = self.served.get("eagle_config") or {}
        return {
            "norm_before_residual": bool(self.served.get("norm_before_residual", False)),
            "norm_before_fc": bool(eagle.get("norm_before_fc", self.served.get("norm_before_fc", False))),
            "fc_norm": bool(self.served.get("fc_norm", False)),
        }

    @property
    def weights(self) -> dict[str, TensorInfo]:
        """The tensors that drafts are computed with, sorted: not the vocabulary's map, nor a rotary table."""
        names = (name for name in sorted(self.tensors) if not name.endswith("rotary_emb.inv_freq"))
        return {name: self.tensors[name] for name in names if name not in ("d2t", "t2d")}

    def has(self, module: str) -> bool:
        """Whether there is a tensor of this module, whatever its last word (quantised weights have others)."""
        return any(name.startswith(f"{module}.") for name in self.tensors)

    @property
    def weight_files(self) -> list[str]:
        return sorted({info.file for info in self.tensors.values()})

    def file_of(self, tensor: str) -> str:
        """The file that holds a tensor, or would hold it."""
        if tensor in self.tensors:
            return f"{self.name}/{self.tensors[tensor].file}"
        there = self.weight_files
        return f"{self.name}/{there[0] if len(there) == 1 else '*.safetensors'}"

    def array(self, tensor: str) -> np.ndarray | None:
        """A tensor's numbers (bf16 as float32); None when they are not on this machine, or scaled (fp8)."""
        info = self.tensors.get(tensor)
        if self.folder is None or info is None or info.dtype not in NUMPY:
            return None
        return files.as_numbers(files.read_tensor(self.folder, info), info.dtype).reshape(info.shape)


def read_head(source: Path | HeadFiles) -> Head:
    """Read a head's config.json and safetensors headers; no weights.

    A folder without safetensors (a dummy load, or pickled weights, which are never read) gives a head without tensors.
    HeadError where the head cannot be read: one line names the file and the field.
    """
    folder = source if isinstance(source, Path) else None
    if isinstance(source, Path):
        source = HeadFiles(str(source), files.read_config(source), files.read_headers(source), files.commit_of(source))
    name, config = source.name, source.config
    if "hidden_size" not in config and isinstance(config.get("text_config"), dict):
        raise HeadError(f"{name} {NO_HEAD}")
    tensors: dict[str, TensorInfo] = {}
    for info in source.tensors.values():
        other = tensors.setdefault(configs.vllm_name(info.name), info)
        if other is not info:
            raise HeadError(f"{info.name} and {other.name} are the same tensor: {name}; remove one of them")
    served = configs.flat_config(config, f"{name}/config.json", tensors)
    architecture = served["architectures"][0] if served["architectures"] else None
    family = configs.FAMILIES.get(architecture or "")
    aux_key, aux_layer_ids = next(iter(configs.aux_places(served).items()), (None, None))
    mask_token_id, mask_token_key = configs.mask_token(served)
    return Head(
        name=name,
        folder=folder,
        commit=source.commit,
        config=config,
        served=served,
        architecture=architecture,
        family=family,
        num_layers=served["num_hidden_layers"],
        hidden_size=served["hidden_size"],
        target_hidden_size=served.get("target_hidden_size") or served["hidden_size"],
        vocab_size=served["vocab_size"],
        draft_vocab_size=served.get("draft_vocab_size") or served["vocab_size"],
        aux_layer_ids=None if aux_layer_ids is None else tuple(aux_layer_ids),
        aux_key=aux_key,
        num_aux=configs.count_aux(served, family, tensors),
        mask_token_id=mask_token_id,
        mask_token_key=mask_token_key,
        trained_depth=configs.trained_depth(config),
        tensors=tensors,
    )


@dataclass(frozen=True)
class VocabularyMap:
    """What ``d2t`` holds."""

    # How it is stored; None when its numbers are not on this machine.
    form: Literal["none", "identity", "offsets", "target ids", "unclear"] | None
    # Of each draft id, int64 [draft vocabulary]; None unless the form is "offsets" or "target ids".
    target_ids: np.ndarray | None = None
    fault: str | None = None  # a whole line: what is wrong with it for vLLM; ``convert`` corrects "target ids" only


def read_map(head: Head) -> VocabularyMap:
    """Read ``d2t``, and ``t2d`` where there is one. Raises HeadError when they cannot be read."""
    info, file = head.tensors.get("d2t"), head.file_of("d2t")
    rows = head.draft_vocab_size
    if info is None:
        sizes = f"draft_vocab_size {rows} is below vocab_size {head.vocab_size}"
        fault = f"d2t is missing, and {sizes}: {file}; {AGAIN}" if head.is_reduced else None
        return VocabularyMap("none", fault=fault)
    if info.shape != (rows,) or info.dtype not in INTEGERS:
        what = f"d2t is {info.dtype} {list(info.shape)}, needs I64 or I32 [{rows}]"
        fault = f'{what}: {file}; correct "draft_vocab_size" in config.json, or {AGAIN}'
        return VocabularyMap("unclear" if head.is_reduced else "identity", fault=fault)
    d2t = head.array("d2t")
    if d2t is None:
        return VocabularyMap(None if head.is_reduced else "identity")
    numbers, draft_ids = d2t.astype(np.int64), np.arange(rows)
    if not head.is_reduced:
        what = f"d2t maps tokens, and draft_vocab_size equals vocab_size ({rows}), where vLLM uses no map"
        fault = f"{what}: {file}; remove d2t, or correct the sizes in config.json"
        is_identity = not numbers.any() or np.array_equal(numbers, draft_ids)
        return VocabularyMap("identity", fault=None if is_identity else fault)

    info = head.tensors.get("t2d")
    is_usable = info is not None and info.shape == (head.vocab_size,) and info.dtype in ("BOOL", *INTEGERS)
    marks = head.array("t2d") if is_usable else None
    marked = None if marks is None else marks.astype(bool).nonzero()[0]
    misfit = _misfit(numbers + draft_ids, marked, head.vocab_size)
    ids_fit = _misfit(numbers, marked, head.vocab_size) is None
    if misfit is None and not ids_fit:
        return VocabularyMap("offsets", numbers + draft_ids)
    if misfit and ids_fit:
        what = "d2t holds target ids, and vLLM adds it to the draft ids"
        return VocabularyMap("target ids", numbers, f"{what}: {file}; store it as offsets (peagle-vllm convert does)")
    reason = misfit or "could be offsets or target ids, and no t2d shows which"
    return VocabularyMap("unclear", fault=f"d2t {reason}: {file}; store it as offsets (target id - draft id)")


def target_ids(head: Head) -> np.ndarray:
    """int64 [draft vocabulary] the target id of each draft id. Raises HeadError when the map cannot be read."""
    vocabulary = read_map(head)
    if vocabulary.target_ids is None and head.is_reduced:
        raise HeadError(vocabulary.fault or f"d2t is not on this machine: {head.name}; download the head")
    return np.arange(head.draft_vocab_size) if vocabulary.target_ids is None else vocabulary.target_ids


def _misfit(targets: np.ndarray, marked: np.ndarray | None, vocab_size: int) -> str | None:
    """Why these cannot be the target ids of the draft ids; None if they can be."""
    if marked is not None and len(marked) != len(targets):
        return f"has {len(targets)} entries where t2d marks {len(marked)} target ids"
    if marked is not None and not np.array_equal(np.sort(targets), marked):
        return "leads to other target ids than t2d marks"
    outside = int(((targets < 0) | (targets >= vocab_size)).sum())
    if outside:
        return f"sends {outside} draft ids outside the vocabulary of {vocab_size} tokens"
    if len(np.unique(targets)) < len(targets):
        return "sends two draft ids to one target id"
    return None
