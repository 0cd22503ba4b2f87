"""What a head is, as far as its files tell."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from peagle_vllm.heads.files import TensorInfo, as_line, read_values

if TYPE_CHECKING:
    import numpy as np

Dialect = Literal["aws", "speculators", "nemo", "specforge", "flat", "vllm", "unknown"]


@dataclass(frozen=True)
class Problem:
    """One line for the user: what is wrong, where, how to mend it. A warning does not stop serving.

    ``by_convert`` marks what ``convert`` mends by itself.
    """

    line: str
    severity: Literal["error", "warning"] = "error"
    by_convert: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "line", as_line(self.line))


@dataclass(frozen=True)
class Head:
    """A head checkpoint, read and not yet judged.

    Attributes:
        name: the folder or hub id it was read from.
        folder: where its files are, or None when only their headers were fetched.
        dialect: who wrote it, by the tell-tales of ``dialects.dialect_of``.
        config: config.json as it stands.
        served: the flat config that it is served with: what vLLM makes of config.json, and ``mapped``.
        mapped: the fields of ``served`` that vLLM does not find by itself (``dialects.mapped_fields``).
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
        tensors: by name, without a leading ``model.`` and with ``midlayer`` called ``layers.0``. Empty when the
            folder holds no safetensors, as with a dummy load.
    """

    name: str
    folder: Path | None
    dialect: Dialect
    config: Mapping[str, Any]
    served: Mapping[str, Any]
    mapped: Mapping[str, Any]
    architecture: str | None
    family: Literal["llama", "qwen3"] | None
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
        """A tensor's values (bf16 as float32), or None when they are not on this machine.

        Raises:
            HeadError: the file cannot be read, or its dtype is not a plain number.
        """
        if self.folder is None or tensor not in self.tensors:
            return None
        info = self.tensors[tensor]
        return read_values(self.folder / info.file, info)

    def mask_hidden(self) -> "np.ndarray | None":
        """The learned hidden state of mask rows, float32 [num_aux * target_hidden_size], or None."""
        import numpy as np

        values = self.values("mask_hidden")
        if values is None:
            return None
        with np.errstate(over="ignore"):  # float64 beyond float32 is Inf in vLLM too
            return values.astype(np.float32).reshape(-1)
