"""A head with fewer draft tokens, with 8-bit weights, or both: written anew in vLLM's format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.files import new_folder
from peagle_vllm.heads.check_weights import not_finite
from peagle_vllm.heads.config import SELECTOR
from peagle_vllm.heads.convert import config_for, copied_tensors, map_tensors, write_head
from peagle_vllm.heads.files import FLOATS, TensorInfo
from peagle_vllm.heads.head import Head, read_head, target_ids
from peagle_vllm.heads.target import Target

Quantization = Literal["fp8", "int8"]
OUTPUT = "lm_head.weight"
# compressed-tensors' names: one scale a row of each weight, activations scaled a token at a time while serving. They
# are what vLLM runs without calibration: fp8 from compute capability 8.9 on (weights only below), int8 from 7.5 on and
# on CPUs.
SCHEMES = {"fp8": ("FP8_DYNAMIC", "float-quantized", "F8_E4M3"), "int8": ("INT8", "int-quantized", "I8")}


def faults(head: Head, draft_vocab: int | None, quantize: Quantization | None) -> Iterator[str]:
    """Why a head cannot be made smaller so."""
    if head.config.get(SELECTOR) is not None:
        yield f"{head.name} is sharpened, and its selector fits no other vocabulary; name the head it was made from"
    if head.is_quantized:
        yield f"{head.name} is quantized already; name the head it was made from"
    for name, info in head.tensors.items():
        if quantize and _is_quantizable(name) and info.dtype not in FLOATS:
            yield f"{name} is stored as {info.dtype}, needs one of {', '.join(FLOATS)}: {head.file_of(name)}"
    if draft_vocab is not None and OUTPUT not in head.tensors:
        yield f"{head.name} has no lm_head of its own (the target's is used), so no row of it can be left out"
    if draft_vocab is not None and draft_vocab >= head.draft_vocab_size:
        yield f"--draft-vocab is {draft_vocab}, {head.name} drafts {head.draft_vocab_size} tokens; give a smaller one"


def rewrite(head: Head, target: Target, out: Path, kept: Tensor | None, quantize: Quantization | None) -> Head:
    """Write a head without ``faults`` to ``out``, and read it again.

    Args:
        kept: draft ids, ascending; None: all of them.

    Raises:
        ToolError: a weight cannot be read, or is NaN or Inf; ``out`` cannot be written, and does not exist then.
    """
    config, tensors = config_for(head, "vllm", target), copied_tensors(head)
    if kept is not None:
        config["draft_vocab_size"] = len(kept)
        tensors |= map_tensors(target_ids(head)[kept.numpy()], head.vocab_size)
        tensors |= _entry(OUTPUT, head.tensors[OUTPUT].dtype, _weight(head, OUTPUT, kept))
    if quantize:
        config["quantization_config"] = quantization_config(quantize, OUTPUT in head.tensors)
        for name in filter(_is_quantizable, head.tensors):
            weight, scale = _quantized(_weight(head, name, kept if name == OUTPUT else None), quantize)
            tensors |= _entry(name, SCHEMES[quantize][2], weight) | _entry(f"{name}_scale", "F32", scale)
    with new_folder(out) as work:
        write_head(work, config, dict(tensors.values()))
    return read_head(out)


def quantization_config(quantize: Quantization, has_output: bool) -> dict[str, Any]:
    """config.json's ``quantization_config``. vLLM's EAGLE-3 classes take one for every layer, fc and lm_head.

    ``fc`` stays as it is: it reads the target's hidden states, a few of which are a hundred times as large as the
    others, and it is a small part of a head.
    """
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

    preset, stored, _ = SCHEMES[quantize]
    targets = ["Linear", "re:.*lm_head$"] if has_output else ["Linear"]
    scheme = preset_name_to_scheme(preset, targets)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=stored,
        ignore=["re:.*fc$"],
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    return config.model_dump(mode="json", exclude_none=True)


def _is_quantizable(name: str) -> bool:
    return name == OUTPUT or (name.startswith("layers.") and name.endswith("_proj.weight"))


def _weight(head: Head, name: str, kept: Tensor | None) -> Tensor:
    """A weight, or the ``kept`` rows of it. Raises ToolError at NaN or Inf."""
    info = head.tensors[name]
    assert head.folder is not None
    with safe_open(head.folder / info.file, "pt") as file:
        weight = file.get_tensor(info.name)
    weight = weight if kept is None else weight[kept]
    if not weight.isfinite().all():
        raise ToolError(*not_finite(head, [name]))
    return weight


def _quantized(weight: Tensor, quantize: Quantization) -> tuple[Tensor, Tensor]:
    """A weight and its scales, as compressed-tensors stores them."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import quantize as rounded
    from compressed_tensors.quantization.utils import calculate_qparams

    args = preset_name_to_scheme(SCHEMES[quantize][0], ["Linear"]).weights
    assert args is not None
    numbers = weight.float()
    scale = calculate_qparams(numbers.amin(1, keepdim=True), numbers.amax(1, keepdim=True), args)[0]
    return rounded(numbers, scale, None, args, dtype=args.pytorch_dtype()), scale


def _entry(name: str, dtype: str, tensor: Tensor) -> dict[str, tuple[TensorInfo, list[bytes]]]:
    info = TensorInfo(name, tuple(tensor.shape), dtype, "", tensor.nbytes)
    return {name: (info, [tensor.contiguous().view(torch.uint8).numpy().tobytes()])}
