"""``peagle-vllm doctor``: what it prints, and how it exits."""

import importlib.metadata
import re
from pathlib import Path

import pytest

import peagle_vllm
from peagle_tools.doctor.compatibility_report import plugin_state
from tests.patches.trees import change, copy_of_used, installed
from tests.support.command import only_line, run


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PEAGLE_VLLM_DISABLE", "PEAGLE_VLLM_ACCEPT", "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def test_it_reports_on_the_installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run("doctor")
    assert ran.exit_code == 0, ran.output
    install = installed()
    for text in (peagle_vllm.__version__, install.version, install.distribution, importlib.metadata.version("torch")):
        assert text in ran.output
    assert re.search(r"plugin +loaded by vLLM", ran.output)
    assert max(map(len, ran.output.splitlines())) <= 80

    variables = {"VLLM_USE_V2_MODEL_RUNNER": "0", "PEAGLE_VLLM_DISABLE": "1", "VLLM_PLUGINS": "another"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ran = run("doctor")
    assert ran.exit_code == 1
    assert all(re.search(rf"{name} +{value}", ran.output) for name, value in variables.items())
    assert re.search(r"plugin +left out by VLLM_PLUGINS=another", ran.output)


def test_why_vllm_does_not_load_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    for plugins, state in (("other, peagle", "left out by"), ("other,peagle", "loaded by vLLM")):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        assert plugin_state().startswith(state)
    for value, state in (("0", "loaded by vLLM"), ("true", "switched off by PEAGLE_VLLM_DISABLE=true")):
        monkeypatch.setenv("PEAGLE_VLLM_DISABLE", value)
        assert plugin_state() == state
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert plugin_state().startswith("not installed as an entry point")


def test_a_changed_patch_is_named_with_its_definitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is exit status 1, unless the patch is accepted."""
    root = copy_of_used(tmp_path)
    change(root, "vllm.v1.worker.gpu.spec_decode.speculator", "self.idx_mapping.fill_(-1)", "pass")
    definition = "DraftModelSpeculator._copy_request_inputs"
    for accepted, state in (("gate", "changed"), ("head-config,v2-speculator", "accepted")):
        monkeypatch.setenv("PEAGLE_VLLM_ACCEPT", accepted)
        ran = run("doctor", "--vllm", root)
        assert ran.exit_code == (state == "changed")
        assert re.search(rf"speculator +V2 +{state}", ran.output) and re.search(r"gate +V2 +holds", ran.output)
        lines = " ".join(ran.output.split())
        assert re.search(rf"v2-speculator: \S+{re.escape(definition)} [0-9a-f]{{8}} -> [0-9a-f]{{8}}", lines)
        assert ("refused: vLLM" in lines) == (state == "changed")

    assert "no: No such file or directory" in only_line(run("doctor", "--vllm", tmp_path / "no"))
    monkeypatch.setenv("PEAGLE_VLLM_ACCEPT", "head config")
    line = only_line(run("doctor", "--vllm", root))
    assert line.startswith("peagle-vllm: 'head config' is no patch: PEAGLE_VLLM_ACCEPT")


def test_a_nightly_is_compared_with_what_it_looks_like(tmp_path: Path) -> None:
    """Over another one's library, as tools/next.py makes it."""
    root = copy_of_used(tmp_path)
    (root / "vllm" / "_version.py").write_text('__version__ = "0.99.0.dev1+cpu.over.0.32.0"\n')
    ran = run("doctor", "--vllm", root)
    assert ran.exit_code == 0
    assert re.search(r"vLLM +0\.99\.0\.dev1\+cpu", ran.output)
    assert re.search(rf"looks like +{installed().minor}; this version itself is not recorded", ran.output)


def test_no_vllm_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle_vllm.patches.version.find_vllm", lambda: None)
    ran = run("doctor")
    assert ran.exit_code == 1
    assert re.search(r"vLLM +not installed", ran.output) and "plugin" not in ran.output
