"""``peagle-vllm diagnose`` on the trained tiny pairs: planted faults are named, healthy heads get no cause."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_tools.diagnose.engine import VllmMeasure
from peagle_tools.diagnose.interventions import Setup
from peagle_tools.diagnose.search import Measured
from peagle_tools.shared.engines import Pair
from tests.inspect.running import Ran, only_line, run
from tests.support import engines
from tests.support.models import EAGLE3, PEAGLE, PEAGLE_REDUCED, QWEN3, QWEN3_PEAGLE, TARGET
from tests.support.serving import environment

pytestmark = pytest.mark.arm("plugin-v1")

Plant = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]  # changes a head's config and weights


@dataclass(frozen=True)
class Case:
    """``named`` names the fault: a cause, a line of the comparison or of the curve, or a reason of ``inspect``."""

    target: Path
    head: Path
    named: str
    plant: Plant = lambda config, weights: None
    options: tuple[str, ...] = ()
    template: bool = True  # whether the target has its chat template

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Target and head, as folders."""
        target, head = self.target, folder / "head"
        if not self.template:
            target = folder / "target"
            shutil.copytree(self.target, target)
            tokenizer = target / "tokenizer_config.json"
            tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": None}))
        head.mkdir()
        fields, weights = (
            json.loads((self.head / "config.json").read_text()),
            load_file(self.head / "model.safetensors"),
        )
        self.plant(fields, weights)
        (head / "config.json").write_text(json.dumps(fields))
        save_file({name: weight.contiguous() for name, weight in weights.items()}, head / "model.safetensors")
        return target, head


def config(**fields: Any) -> Plant:
    return lambda config, weights: config.update(fields)


def layers(**fields: Any) -> Plant:
    return lambda config, weights: config["transformer_layer_config"].update(fields)


def mask_hidden(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return lambda config, weights: weights.update(mask_hidden=change(weights["mask_hidden"]))


def target_ids(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"] += torch.arange(len(weights["d2t"]))


LLAMA, QWEN = (TARGET, PEAGLE), (QWEN3, QWEN3_PEAGLE)
AUX = "eagle_aux_hidden_state_layer_ids"
LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 8.0}
FAULTS: Mapping[str, Case] = {
    "prompts without the chat template": Case(*QWEN, "cause: prompts through the chat template", options=("--raw",)),
    "target without a chat template": Case(*LLAMA, "has no chat template", template=False),
    "aux layers one too low": Case(*LLAMA, "cause: aux layers [2, 5, 7] for [1, 4, 6]", config(**{AUX: [1, 4, 6]})),
    "aux layers one too high": Case(*QWEN, "cause: aux layers [2, 5, 7] for [3, 6, 8]", config(**{AUX: [3, 6, 8]})),
    "rope theta": Case(*LLAMA, "cause: rope theta 10000.0", layers(rope_parameters={"rope_theta": 100.0})),
    "rope scaling": Case(*QWEN, "cause: rope scaling", layers(rope_parameters=LINEAR)),
    "rms eps": Case(*LLAMA, "rms_norm_eps is 0.5, the target's 1e-05", layers(rms_norm_eps=0.5)),
    "mask token": Case(*LLAMA, "cause: mask token 6 (<|mask|>) for 300", config(mask_token_id=300)),
    "mask_hidden rotated": Case(*QWEN, "mask_hidden", mask_hidden(lambda m: m.roll(17))),
    "norm_before_residual": Case(*LLAMA, "cause: norm_before_residual False", config(norm_before_residual=True)),
    "fc_norm": Case(*LLAMA, "fc_norm is set, the weights hold no fc_norm", config(fc_norm=True)),
    "norm_before_fc": Case(*QWEN, "norm_before_fc is set", config(norm_before_fc=True)),
    "d2t with target ids": Case(TARGET, PEAGLE_REDUCED, "d2t holds target ids", target_ids),
}
HEALTHY = {
    f"{pair[1].name}, K={k}": (*pair, k) for pair in (LLAMA, (TARGET, PEAGLE_REDUCED), QWEN) for k in range(3, 9)
}
ENGINE = json.dumps({"dtype": "float32"})
QUICK = ("rope scaling", "fc_norm", "d2t with target ids", "tiny-qwen3-peagle, K=5")
FEWER = ("--num-prompts", 12, "--max-tokens", 48)  # a fifth of the rounds, for those in every run


def some(names: object) -> list:
    """QUICK ones in every run, all in the full one."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in names]


def diagnosed(monkeypatch: pytest.MonkeyPatch, target: Path, head: Path, *options: object) -> Ran:
    engines.shut_down()
    with engines.no_collection():
        return run(monkeypatch, "diagnose", "--target", target, "--head", head, *options, "--engine", ENGINE, "--json")


def named_in(ran: Ran) -> list[str]:
    """What it names, a line each, causes first."""
    if not ran.out:
        return [line for line in ran.err.splitlines() if line.startswith("error: ")]
    data = json.loads(ran.out)
    causes = [f"cause: {cause['change']} ({cause['gain']:+.0%})" for cause in data["causes"]]
    return [*causes, *data["differences"], *data["unusual"][-1:]]


@pytest.mark.parametrize("name", some(FAULTS))
def test_a_planted_fault_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And no other cause."""
    case = FAULTS[name]
    lines = named_in(diagnosed(monkeypatch, *case.write(tmp_path), *case.options, *(FEWER if name in QUICK else ())))
    assert any(case.named in line for line in lines), lines
    assert all(case.named in line for line in lines if line.startswith("cause")), lines


@pytest.mark.parametrize("name", some(HEALTHY))
def test_a_healthy_head_gets_no_cause(name: str, monkeypatch: pytest.MonkeyPatch):
    target, head, k = HEALTHY[name]
    fewer = FEWER if name in QUICK else ()
    ran = diagnosed(monkeypatch, target, head, "-k", k, *fewer)
    data = json.loads(ran.out)
    assert (ran.code, named_in(ran)) == (0, [])
    assert data["complete"] and data["drafts"] > 80 and len(data["trials"]) > 7
    progress = [line for line in ran.err.splitlines() if "changes left" in line]
    assert len(progress) == len(data["trials"]) + 1


def test_changes_reach_an_engine_in_a_process_of_its_own():
    """As a user runs the command: what goes to vLLM's workers is serialised."""
    command = [sys.executable, "-m", "peagle_tools.cli", "diagnose", "--target", TARGET, "--head", PEAGLE, "-k", "3"]
    command += ["--num-prompts", "4", "--max-tokens", "16", "--engine", ENGINE, "--json"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr
    trials = json.loads(ran.stdout)["trials"]
    assert {"aux layers", "rope theta"} <= {trial["kind"] for trial in trials if trial["gain"] < 0}


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "engine", lambda *_: nullcontext())


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("measurement", [1, 4])
def test_what_was_measured_before_an_interrupt_is_shown(
    measurement: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    measured = []

    def measure(self: VllmMeasure, setup: Setup) -> Measured:
        from tests.diagnose.test_search import Pair

        measured.append(setup)
        if len(measured) == measurement:
            raise KeyboardInterrupt
        print("a log line of vLLM")
        os.write(1, b"a line of a library\n")
        return Pair()(setup)

    monkeypatch.setattr(VllmMeasure, "__call__", measure)
    ran = run(monkeypatch, "diagnose", "--target", TARGET, "--head", PEAGLE, "--json")
    os.write(1, b"afterwards\n")
    assert capfd.readouterr() == ("afterwards\n", "a line of a library\n" * (measurement - 1))
    assert ran.err.count("a log line of vLLM") == measurement - 1
    if measurement == 1:
        assert (ran.code != 0, ran.out) == (True, "")
        return
    data = json.loads(ran.out)
    assert (ran.code, data["complete"], len(data["trials"])) == (1, False, 2)


def test_what_inspect_finds_needs_no_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Pair, "engine", lambda *_: pytest.fail("an engine started"))
    for head, line in ((EAGLE3, "is no P-EAGLE head"), (TARGET, "is a target")):
        ran = run(monkeypatch, "diagnose", "--target", TARGET, "--head", head)
        assert (ran.code, ran.out) == (1, "")
        assert line in ran.err


def test_unreadable_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pair = ("--target", TARGET, "--head", PEAGLE)
    assert "are needed, or --url" in only_line(run(monkeypatch, "diagnose", "--target", TARGET))
    assert "cannot be read" in only_line(run(monkeypatch, "diagnose", *pair, "--prompts", tmp_path / "absent"))
    assert "not a JSON object" in only_line(run(monkeypatch, "diagnose", *pair, "--engine", "[]"))
    line = only_line(run(monkeypatch, "diagnose", *pair, "--engine", '{"no_such_argument": 1}'))
    assert "vLLM cannot run this pair" in line and "no_such_argument" in line
    assert line.endswith("; serve the target alone first, then with this head")
