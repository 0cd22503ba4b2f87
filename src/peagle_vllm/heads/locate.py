"""Where a head's files are: a folder, the Hugging Face cache, or the hub, of which only headers are fetched."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle_vllm.heads.files import INDEX, HeadError, TensorInfo, is_file, one_line, read_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteHead:
    """A head on the hub whose weights are not here: its config.json and its tensors' headers."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def locate(model: str, revision: str | None = None) -> Path | RemoteHead | None:
    """Find a head without downloading its weights.

    Args:
        model: a folder or a hub id.
        revision: branch, tag or commit on the hub.

    Returns:
        The folder; or the headers, when the hub has the head and this machine does not; or None when neither can be
        reached. A failing hub never raises: vLLM, which needs the weights, says best what is wrong.
    """
    try:
        return _search(model, revision)
    except HeadError:
        raise
    except Exception as error:
        logger.debug("%s: no headers from the hub (%s)", model, error)
        return None


def find(model: str, revision: str | None = None) -> Path | RemoteHead:
    """The same for a tool, which has nobody to leave the reason to.

    Raises:
        HeadError: the head is nowhere; the line says why.
    """
    try:
        found = _search(model, revision)
    except HeadError:
        raise
    except Exception as error:
        raise HeadError(
            f"{model} is no folder, and the hub does not give it ({one_line(error)}); check the name"
        ) from None
    if found is None:
        raise HeadError(
            f"{model} is no folder and not in the hub's cache, and HF_HUB_OFFLINE is set; name a folder, or unset it"
        )
    return found


def download(model: str, revision: str | None = None) -> Path:
    """The folder of a head with its weights, fetched from the hub where it is not on this machine.

    Raises:
        HeadError: it cannot be had.
    """
    found = find(model, revision)
    if isinstance(found, Path):
        return found
    try:
        import huggingface_hub as hub

        return Path(hub.snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise HeadError(f"{model} cannot be downloaded ({one_line(error)}); try again") from None


def _search(model: str, revision: str | None) -> Path | RemoteHead | None:
    if Path(model).is_dir():
        return Path(model)
    import huggingface_hub as hub
    from huggingface_hub import constants

    cached = hub.try_to_load_from_cache(model, "config.json", revision=revision)
    if isinstance(cached, str) and _has_weights(Path(cached).parent):
        return Path(cached).parent
    if constants.HF_HUB_OFFLINE:
        return None
    metadata = hub.get_safetensors_metadata(model, revision=revision)
    config = read_json(Path(hub.hf_hub_download(model, "config.json", revision=revision)))
    tensors = {
        name: TensorInfo(name, tuple(info.shape), info.dtype, file)
        for file, header in metadata.files_metadata.items()
        for name, info in header.tensors.items()
    }
    return RemoteHead(model, config, tensors)


def _has_weights(snapshot: Path) -> bool:
    """Whether a snapshot of the cache holds every safetensors file; it may hold the config alone."""
    if not (snapshot / INDEX).exists():
        return any(snapshot.glob("*.safetensors"))
    weight_map = read_json(snapshot / INDEX).get("weight_map")
    return isinstance(weight_map, dict) and all(is_file(snapshot / str(file)) for file in weight_map.values())
