"""The real target's folder is what was read, and without the package index one line says so."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import TARGET
from tools.real_target import differences

SAMPLES = ["def add(a, b):\n    return a + b", "What is a hash table?"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TARGET, tmp_path / "target"))


def found(folder: Path) -> list[str]:
    """What is not as in the tiny target, read in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    return differences(folder, model, AutoTokenizer.from_pretrained(TARGET), SAMPLES)


def test_a_folder_as_it_was_read_has_no_differences(folder: Path) -> None:
    assert found(folder) == []


def test_a_weight_that_differs_is_found(folder: Path) -> None:
    """By one bit of one element."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"].view(torch.int16)[5, 7] ^= 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert found(folder) == ["model.layers.3.mlp.up_proj.weight"]


def test_weights_of_another_dtype_are_found(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: each.float() for name, each in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    assert len(found(folder)) == len(weights)


def test_another_tokenizer_or_template_is_found(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": config["chat_template"] + " "}))
    assert found(folder) == ["the chat template"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["d"] = vocab["d"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert [each[:20] for each in found(folder)] == ["the tokens of 'def a", "the chat template"]


def test_without_the_index_one_line_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left. A hash that is not the file's is refused by pip itself."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name, value in {"PIP_RETRIES": "0", "PIP_TIMEOUT": "1", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "tools.real_target", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("http://127.0.0.1:9/simple does not give the wheels of real.txt (ERROR: No matching")
    assert list((tmp_path / "cache").iterdir()) == []
