"""Reading a head: the one place that turns a checkpoint into a ``Head``."""

from collections.abc import Mapping
from pathlib import Path

from peagle_vllm.heads import config as configs
from peagle_vllm.heads.dialects import dialect_of, mapped_fields
from peagle_vllm.heads.files import HeadError, TensorInfo, read_headers, read_json
from peagle_vllm.heads.head import Head
from peagle_vllm.heads.locate import RemoteHead, locate
from peagle_vllm.heads.names import vllm_name

__all__ = ["Head", "HeadError", "RemoteHead", "TensorInfo", "locate", "read_head"]


def read_head(source: Path | RemoteHead) -> Head:
    """Read a head's config.json and safetensors headers; no weights.

    A folder without safetensors (a dummy load, or pickled weights, which are never read) yields a head without
    tensors.

    Raises:
        HeadError: the head cannot be read; one line names the file and the field.
    """
    if isinstance(source, RemoteHead):
        return _head(source.name, None, source.config, source.tensors)
    return _head(str(source), source, read_json(source / "config.json"), read_headers(source))


def _head(name: str, folder: Path | None, config: configs.Config, raw: Mapping[str, TensorInfo]) -> Head:
    file = f"{name}/config.json"
    tensors = _by_vllm_name(raw, name)
    stock = configs.stock_config(config, file)
    mapped = mapped_fields(config, stock, tensors, file)
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
        dialect=dialect_of(config, raw),
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
        name = vllm_name(info.name)
        if name in tensors:
            raise HeadError(f"{info.name} and {tensors[name].name} are the same tensor: {where}; remove one of them")
        tensors[name] = info
    return tensors
