"""A run of `train run` small enough for a test: a target of three tensors, documents and hidden states made up."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import save_file
from transformers import LlamaConfig

from peagle_tools.train import training
from peagle_tools.train.peagle_yaml import STAMP, Config, read_config
from peagle_tools.train.trainer import Trainer

HIDDEN, LAYERS = 16, 8
VOCAB, MASK = 32, 31
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 512}
FORK = get_context("fork")
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}  # of tiny-llama
ENGINE |= {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"held_out": 4},
    "head": {"layers": 2, "depths": 3},
    "step": {"tokens": 64, "chunk_rows": 16, "cod": [0.7, 0.2], "dtype": "float32"},
    "optimizer": {"lr": 0.01, "steps": 12},
    "every": {"checkpoint": 3, "replay": 6},
    "engine": {"dtype": "float32"},
    "speculators": {"num_workers": 0, "log_freq": 1},
}


def toy_target(folder: Path) -> None:
    torch.manual_seed(1)
    sizes = SIZES | {"num_hidden_layers": LAYERS, "num_key_value_heads": 2, "vocab_size": VOCAB}
    LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(folder)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    weights = {name: torch.randn(VOCAB, HIDDEN) for name in names} | {"model.norm.weight": torch.ones(HIDDEN)}
    save_file(weights, folder / "model.safetensors")
    vocab = {f"w{i}": i for i in range(MASK)}
    added = [{"id": MASK, "content": "<|mask|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))


def toy_run(folder: Path, documents: list[tuple[int, int]] | None = None, **changes: dict[str, Any]) -> Path:
    """peagle.yaml of a run on ``documents``, of so many tokens, of which the first are not supervised.

    Args:
        changes: keys of a section in place of, or next to, those of ``SETTINGS``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    toy_target(folder / "target")
    settings = {part: {**SETTINGS.get(part, {}), **changes.get(part, {})} for part in SETTINGS | changes}
    file = folder / "peagle.yaml"
    file.write_text(yaml.safe_dump({"target": "./target", **settings}))
    config = read_config(file)
    torch.manual_seed(2)
    rows = documents or [(length, 4) for length in torch.randint(12, 40, (24,)).tolist()]
    tokens = [torch.randint(MASK, (length,)) for length, _ in rows]
    masks = [(torch.arange(length) >= start).long() for length, start in rows]
    columns = {"input_ids": tokens, "loss_mask": masks, "seq_len": [length for length, _ in rows]}
    data = config.data_folder
    Dataset.from_dict(columns).with_format("torch").save_to_disk(data)
    (data / STAMP).write_text(json.dumps(config.stamp))
    (data / "hidden_states").mkdir()
    for row, ids in enumerate(tokens):
        states = torch.randn(len(ids), len(config.aux_layers) + 1, HIDDEN).to(getattr(torch, config.target_dtype))
        save_file({"hidden_states": states, "token_ids": ids}, data / f"hidden_states/hs_{row}.safetensors")
    return file


def train(file: Path) -> Any:
    return training.train(read_config(file))


def new_trainer(file: Path) -> Any:
    """That of a run, before its first step or where its newest checkpoint is."""
    config = read_config(file)
    return training.make_trainer(config, training.to_options(config))


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, what: Callable[[], object], rank: int = 0) -> None:
    """Call ``what`` when the optimizer of this process is about to make ``step``."""
    original = Trainer._optimizers_step

    def wrapped(self: Trainer) -> None:
        if self.global_step == step - 1 and self.rank == rank:
            what()
        original(self)

    monkeypatch.setattr(Trainer, "_optimizers_step", wrapped)


stop = partial(signal.raise_signal, signal.SIGTERM)  # what ends this process's run after the step that it is in


def in_child(work: Callable[..., object], *args: object, env: dict[str, str] | None = None) -> Any:
    """A forked process that does ``work``."""

    def child() -> None:
        os.environ.update(env or {})
        work(*args)

    process = FORK.Process(target=child)
    process.start()
    return process


def exit_code(process: Any, seconds: float = 60) -> int:
    """Of a process, which is killed after so many seconds, such as one that waits for another."""
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode


def result(file: Path) -> dict[str, Any]:
    """What two runs of one config must share: the last checkpoint's bytes, which one is the best, the log, and AL."""
    config: Config = read_config(file)
    folder = config.run / "checkpoints"
    last = max(folder.glob("step-*[0-9]"), key=lambda path: int(path.name.split("-")[1]))
    names = ("model.safetensors", "master.safetensors", "optimizer.pt", "scheduler.pt")
    log = [json.loads(line) for line in (config.run / "log.jsonl").read_text().splitlines()]
    measured = ("tokens/s", "ms", "peak_gb", "time")
    shown = [{key: value for key, value in line.items() if key not in measured} for line in log]
    contents = {name: (last / name).read_bytes() for name in names}
    al = (config.run / "al.jsonl").read_text()
    return {**contents, "last": last.name, "best": (folder / "best").readlink(), "log": shown, "al": al}
