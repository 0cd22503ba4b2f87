"""``peagle-vllm diagnose`` on the trained tiny pairs: planted faults are named, healthy heads get no cause."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_vllm.diagnose.report import FIELDS
from tests import engines
from tests.commands.running import only_line, run
from tests.models import EAGLE3, PEAGLE, PEAGLE_REDUCED, QWEN3, QWEN3_PEAGLE, TARGET

pytestmark = pytest.mark.arm("plugin-v1")

ENGINE = json.dumps({"dtype": "float32", "kv_cache_memory_bytes": 1 << 28})


def diagnosed(monkeypatch: pytest.MonkeyPatch, target: Path, head: Path, *options: object) -> dict:
    engines.shut_down()
    options = (*options, "--max-tokens", 48, "--engine", ENGINE, "--json")
    with engines.no_collection():
        ran = run(monkeypatch, "diagnose", "--target", target, "--head", head, *options)
    data = json.loads(ran.out)
    assert list(data) == list(FIELDS)
    assert ran.code == (1 if data["odd"] else 0)
    return data


def copied(head: Path, folder: Path, **fields: object) -> Path:
    shutil.copytree(head, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("pair", [(TARGET, PEAGLE), (TARGET, PEAGLE_REDUCED), (QWEN3, QWEN3_PEAGLE)], ids=str)
def test_healthy_heads_get_no_cause(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    data = diagnosed(monkeypatch, *pair)
    assert (data["odd"], data["trials"], data["causes"]) == ([], [], [])
    assert data["acceptance_length"] > 3 and data["drafts"] > 80


def only_cause(data: dict) -> dict:
    (cause,) = data["causes"]
    before, after = cause["acceptance_length"]
    assert before == data["acceptance_length"] and after >= 1.15 * before
    return cause


def test_another_mask_token_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = diagnosed(monkeypatch, TARGET, copied(PEAGLE, tmp_path / "head", mask_token_id=300))
    cause = only_cause(data)
    assert cause["change"] == "mask token 6 (<|mask|>) for 300"
    assert 'set "mask_token_id" to 6' in cause["mend"]
    assert {trial["kind"] for trial in data["trials"]} >= {"aux layers", "mask token", "K"}


def test_other_aux_layers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    planted = copied(QWEN3_PEAGLE, tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    cause = only_cause(diagnosed(monkeypatch, QWEN3, planted))
    assert cause["kind"] == "aux layers"
    assert "eagle_aux_hidden_state_layer_ids" in cause["mend"]


def test_raw_prompts_are_named(monkeypatch: pytest.MonkeyPatch):
    cause = only_cause(diagnosed(monkeypatch, QWEN3, QWEN3_PEAGLE, "--raw"))
    assert cause["kind"] == "chat template"


def test_what_inspect_finds_needs_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    planted = copied(PEAGLE, tmp_path / "head")
    weights = load_file(planted / "model.safetensors")
    weights["mask_hidden"] = torch.zeros_like(weights["mask_hidden"])
    save_file(weights, planted / "model.safetensors")
    monkeypatch.setattr("peagle_vllm.diagnose.engine.VllmMeasure._engine", lambda *_: pytest.fail("an engine started"))
    for head, line in ((planted, "mask_hidden is all zeros"), (EAGLE3, "is no P-EAGLE head")):
        ran = run(monkeypatch, "diagnose", "--target", TARGET, "--head", head)
        assert (ran.code, ran.out) == (1, "")
        assert line in ran.err


def test_unreadable_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pair = ("--target", TARGET, "--head", PEAGLE)
    assert "cannot be read" in only_line(run(monkeypatch, "diagnose", *pair, "--prompts", tmp_path / "absent"))
    assert "not a JSON object" in only_line(run(monkeypatch, "diagnose", *pair, "--engine", "[]"))
    assert "is not a folder" in only_line(run(monkeypatch, "diagnose", "--target", "no/where", "--head", PEAGLE))
    line = only_line(run(monkeypatch, "diagnose", *pair, "--engine", '{"no_such_argument": 1}'))
    assert "vLLM cannot run this pair" in line and "no_such_argument" in line
