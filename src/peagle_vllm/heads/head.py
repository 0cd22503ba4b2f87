"""What a head is, as far as its files tell: ``read_head`` is the one place that makes a ``Head`` of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle_vllm.heads import config as configs
from peagle_vllm.heads.files import NUMPY, HeadError, RemoteHead, TensorInfo, read_headers, read_json, read_tensor

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Head:
    """A head checkpoint, read and not yet checked.

    Attributes:
        name: the folder or hub id it was read from.
        folder: where its files are, or None when only their headers were fetched.
        dialect: who wrote it.
        config: config.json as it stands.
        served: the flat config that it is served with: what vLLM makes of config.json, and ``mapped``.
        mapped: the fields of ``served`` that vLLM does not find by itself (``config.mapped_fields``).
        architecture: the model class name that vLLM looks up, or None where it finds none.
        family: "llama" or "qwen3", the classes of vLLM that can draft in parallel; None for any other.
        target_hidden_size: width of the target's hidden states.
        draft_vocab_size: rows of the head's lm_head; ``vocab_size`` when the config names none.
        aux_layer_ids: target layers it reads, n being the residual entering layer n; None means vLLM's default.
        aux_key: the config field they came from.
        num_aux: aux hidden states that vLLM builds ``fc`` for.
        mask_token_id: as it stands in the config, so not always a whole number; None when there is none.
        mask_token_key: the config field it came from.
        trained_depth: tokens drafted ahead in training, where the config tells.
        tensors: by vLLM's names (``config.vllm_name``). Empty when the folder holds no safetensors, as with a dummy
            load.
    """

    name: str
    folder: Path | None
    dialect: configs.Dialect
    config: Mapping[str, Any]
    served: Mapping[str, Any]
    mapped: Mapping[str, Any]
    architecture: str | None
    family: configs.Family | None
    num_layers: int
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...] | None
    aux_key: str | None
    num_aux: int
    mask_token_id: object
    mask_token_key: str | None
    trained_depth: int | None
    tensors: Mapping[str, TensorInfo]

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
    def is_eagle3(self) -> bool:
        """Whether nothing of P-EAGLE is there: an EAGLE-3 head, most likely."""
        return bool(self.tensors) and not self.has_mask_hidden and self.mask_token_id is None

    @property
    def aux_needed(self) -> int:
        """Aux hidden states that ``fc`` takes, by its shape where that tells, else as vLLM counts them."""
        return configs.aux_of_fc(self.served, self.tensors, self.config_file) or self.num_aux

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
    def has_mask_hidden(self) -> bool:
        return "mask_hidden" in self.tensors

    def has(self, part: str) -> bool:
        """Whether there is a tensor of this module, whatever its last word (quantised weights have others)."""
        return any(name.startswith(f"{part}.") for name in self.tensors)

    def file_of(self, tensor: str) -> str:
        """The file that holds a tensor, or would hold it."""
        files = sorted({info.file for info in self.tensors.values()})
        file = self.tensors[tensor].file if tensor in self.tensors else files[0] if len(files) == 1 else "*.safetensors"
        return f"{self.name}/{file}"

    def values(self, tensor: str) -> "np.ndarray | None":
        """A tensor's values (bf16 as float32); None when they are not on this machine, or no plain numbers (fp8).

        Raises:
            HeadError: the file cannot be read.
        """
        info = self.tensors.get(tensor)
        return read_tensor(self.folder, info) if self.folder and info and info.dtype in NUMPY else None

    def mask_hidden(self) -> "np.ndarray | None":
        """The learned hidden state of mask rows, float32 [num_aux * target_hidden_size], or None."""
        import numpy as np

        values = self.values("mask_hidden")
        if values is None:
            return None
        with np.errstate(over="ignore"):  # float64 beyond float32 is Inf in vLLM too
            return values.astype(np.float32).reshape(-1)


def read_head(source: Path | RemoteHead) -> Head:
    """Read a head's config.json and safetensors headers; no weights.

    A folder without safetensors (a dummy load, or pickled weights, which are never read) yields a head without
    tensors.

    Raises:
        HeadError: the head cannot be read; one line names the file and the field.
    """
    if isinstance(source, RemoteHead):
        folder, name, config, raw = None, source.name, source.config, source.tensors
    else:
        folder, name = source, str(source)
        config, raw = read_json(source / "config.json"), read_headers(source)
    file = f"{name}/config.json"
    tensors = _by_vllm_name(raw, name)
    stock = configs.stock_config(config, file)
    mapped = configs.mapped_fields(config, stock, tensors, file)
    served = {**stock, **mapped}
    architecture = served["architectures"][0] if served["architectures"] else None
    family = configs.family_of(architecture)
    hidden_size = configs.positive(served, "hidden_size", file)
    vocab_size = configs.positive(served, "vocab_size", file)
    has_draft_vocab = served.get("draft_vocab_size") is not None
    aux_layer_ids, aux_key = configs.aux_layers(stock, file)
    mask_token_id, mask_token_key = configs.mask_token(config, served, file)
    return Head(
        name=name,
        folder=folder,
        dialect=configs.dialect_of(config, raw),
        config=config,
        served=served,
        mapped=mapped,
        architecture=architecture,
        family=family,
        num_layers=configs.positive(served, "num_hidden_layers", file),
        hidden_size=hidden_size,
        target_hidden_size=configs.positive(served, "target_hidden_size", file, hidden_size),
        vocab_size=vocab_size,
        draft_vocab_size=configs.positive(served, "draft_vocab_size", file) if has_draft_vocab else vocab_size,
        aux_layer_ids=aux_layer_ids,
        aux_key=aux_key,
        num_aux=configs.count_aux(served, family, file),
        mask_token_id=mask_token_id,
        mask_token_key=mask_token_key,
        trained_depth=configs.trained_depth(config),
        tensors=tensors,
    )


def _by_vllm_name(raw: Mapping[str, TensorInfo], where: str) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for info in raw.values():
        name = configs.vllm_name(info.name)
        if name in tensors:
            raise HeadError(f"{info.name} and {tensors[name].name} are the same tensor: {where}; remove one of them")
        tensors[name] = info
    return tensors
