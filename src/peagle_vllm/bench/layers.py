"""How many layers a model has: what a draft forward may cost, where cells cannot tell."""

import json
from pathlib import Path
from typing import Any

from peagle_vllm.bench.suite import Suite, is_path


def layers(suite: Suite, folder: Path, arm_name: str) -> dict[str, int]:
    """Layers of ``target`` and ``draft``; what no config.json on this machine tells is left out."""
    names = {"target": suite.target, "draft": (suite.arms[arm_name].speculative_config or {}).get("model")}
    found = {}
    for role, name in names.items():
        if isinstance(name, str) and (number := _layers(name, folder)):
            found[role] = number
    return found


def _layers(name: str, folder: Path) -> int | None:
    file = folder / name / "config.json" if is_path(name) else _from_hub_cache(name)
    if file is None or not file.is_file():
        return None
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        return None
    nested = [config.get(key) for key in ("transformer_layer_config", "text_config")]
    for place in (*nested, config):
        if isinstance(place, dict) and isinstance(place.get("num_hidden_layers"), int):
            return place["num_hidden_layers"]
    return None


def _from_hub_cache(name: str) -> Path | None:
    """The server has just loaded it, so it is there. Nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of a repository
        return None
    return Path(found) if isinstance(found, str) else None
