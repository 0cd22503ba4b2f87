"""What is kept of a cell beside its samples: everything that was asked for, without this machine's own paths."""

import hashlib
import json
from pathlib import Path
from typing import Any

from peagle_vllm.bench.cells import SAMPLES, Cell
from peagle_vllm.bench.client import bench_arguments
from peagle_vllm.bench.server import serve_arguments, serve_environment
from peagle_vllm.bench.suite import Suite, is_path


def configuration(suite: Suite, folder: Path, cell: Cell, *, server: list[str], client: list[str]) -> dict[str, Any]:
    """Everything that was asked for, as commands, variables and data; ``folder`` is the suite's."""
    dataset = suite.datasets[cell.dataset]
    found: dict[str, Any] = {
        "suite": suite.name,
        "suite_fingerprint": suite.fingerprint(),
        "serve": ["python", *server[1:], *serve_arguments(suite, cell.arm, cell.k)],
        "bench": ["python", *client[1:], *bench_arguments(suite, cell)],
        "environment": serve_environment(suite, cell.arm),
        "dataset": dataset.model_dump(mode="json", exclude_none=True),
        "layers": layers(suite, folder, cell.arm),
    }
    if dataset.jsonl is not None:
        found["dataset"]["sha256"] = hashlib.sha256((folder / dataset.jsonl).read_bytes()).hexdigest()
    return found


def without_paths(text: str) -> str:
    """A result says nothing about where things lie on the machine that made it."""
    return text.replace(str(Path.cwd()), ".").replace(str(Path.home()), "~")


def without_texts(raw: dict[str, Any]) -> dict[str, Any]:
    """Samples rounded to the microsecond; texts as hashes, enough to see whether two arms wrote the same."""
    kept = {name: value for name, value in raw.items() if name not in ("generated_texts", "errors", "tokenizer_id")}
    for name in SAMPLES:
        if name in kept:
            kept[name] = [[round(v, 6) for v in x] if isinstance(x, list) else round(x, 6) for x in kept[name]]
    texts = raw.get("generated_texts", [])
    kept["texts_sha256"] = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
    return kept


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
