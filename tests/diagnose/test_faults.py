"""``peagle-vllm diagnose`` on the trained tiny pairs: planted faults are named, healthy heads get no cause."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_tools.diagnose.engine import VllmMeasure
from peagle_tools.diagnose.report import FIELDS
from tests.diagnose.faults import FAULTS, HEALTHY, said
from tests.inspect.running import Ran, only_line, run
from tests.support import engines
from tests.support.models import EAGLE3, PEAGLE, TARGET

pytestmark = pytest.mark.arm("plugin-v1")

ENGINE = json.dumps({"dtype": "float32"})
QUICK = ("rope scaling", "fc_norm", "d2t with target ids", "tiny-qwen3-peagle, K=5")


def some(names: object) -> list:
    """QUICK ones in every run, all in the full one."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in names]


def diagnosed(monkeypatch: pytest.MonkeyPatch, target: Path, head: Path, *options: object) -> Ran:
    engines.shut_down()
    with engines.no_collection():
        return run(monkeypatch, "diagnose", "--target", target, "--head", head, *options, "--engine", ENGINE, "--json")


@pytest.mark.parametrize("name", some(FAULTS))
def test_a_planted_fault_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case = FAULTS[name]
    ran = diagnosed(monkeypatch, *case.write(tmp_path), *case.options)
    assert case.is_named(said(ran.out, ran.err)), said(ran.out, ran.err)


@pytest.mark.parametrize("name", some(HEALTHY))
def test_a_healthy_head_gets_no_cause(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target, head, k = HEALTHY[name]
    ran = diagnosed(monkeypatch, target, head, "-k", k, "--out", tmp_path / "out.json")
    data = json.loads(ran.out)
    assert list(data) == list(FIELDS)
    assert (ran.code, said(ran.out, ran.err)) == (0, [])
    assert data["complete"] and data["drafts"] > 80 and len(data["trials"]) > 10
    progress = [line for line in ran.err.splitlines() if "changes left" in line]
    assert len(progress) == len(data["trials"]) + 1
    assert json.loads((tmp_path / "out.json").read_text()) == data


@pytest.mark.parametrize("measurement", [1, 4])
def test_what_was_measured_before_an_interrupt_is_shown(
    measurement: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    measured, kept, out = [], [], tmp_path / "out.json"

    def measure(self: VllmMeasure, setup: object) -> object:
        from tests.diagnose.test_search import Pair

        measured.append(setup)
        kept.append(out.read_text())
        if len(measured) == measurement:
            raise KeyboardInterrupt
        print("a log line of vLLM")
        os.write(1, b"a line of a library\n")
        return Pair()(setup)

    monkeypatch.setattr(VllmMeasure, "__call__", measure)
    ran = run(monkeypatch, "diagnose", "--target", TARGET, "--head", PEAGLE, "--json", "--out", out)
    os.write(1, b"afterwards\n")
    assert capfd.readouterr() == ("afterwards\n", "a line of a library\n" * (measurement - 1))
    assert ran.err.count("a log line of vLLM") == measurement - 1
    if measurement == 1:
        assert (ran.code != 0, ran.out) == (True, "")
        return
    data = json.loads(ran.out)
    assert (ran.code, data["complete"], len(data["trials"])) == (1, False, 2)
    assert json.loads(out.read_text()) == data
    assert [len(json.loads(text)["trials"]) for text in kept[1:]] == [0, 1, 2]


def test_what_inspect_finds_needs_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    planted = tmp_path / "head"
    shutil.copytree(PEAGLE, planted)
    weights = load_file(planted / "model.safetensors")
    weights["mask_hidden"] = torch.zeros_like(weights["mask_hidden"])
    save_file(weights, planted / "model.safetensors")
    monkeypatch.setattr(VllmMeasure, "__call__", lambda *_: pytest.fail("an engine started"))
    for head, line in ((planted, "mask_hidden is all zeros"), (EAGLE3, "is no P-EAGLE head"), (TARGET, "is a target")):
        ran = run(monkeypatch, "diagnose", "--target", TARGET, "--head", head)
        assert (ran.code, ran.out) == (1, "")
        assert line in ran.err


def test_unreadable_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pair = ("--target", TARGET, "--head", PEAGLE)
    assert "are needed, or --url" in only_line(run(monkeypatch, "diagnose", "--target", TARGET))
    assert "cannot be read" in only_line(run(monkeypatch, "diagnose", *pair, "--prompts", tmp_path / "absent"))
    assert "not a JSON object" in only_line(run(monkeypatch, "diagnose", *pair, "--engine", "[]"))
    assert "cannot be written" in only_line(run(monkeypatch, "diagnose", *pair, "--out", tmp_path))
    assert "is not a folder" in only_line(run(monkeypatch, "diagnose", "--target", "no/where", "--head", PEAGLE))
    line = only_line(run(monkeypatch, "diagnose", *pair, "--engine", '{"no_such_argument": 1}'))
    assert "vLLM cannot run this pair" in line and "no_such_argument" in line
