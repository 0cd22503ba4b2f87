"""A suite for synthetic results: three arms, two depths, two concurrencies, two repeats; a smaller one; stand-ins."""

from pathlib import Path

import pytest

from peagle_tools.bench import client
from peagle_tools.bench.suite import Suite
from peagle_tools.shared import server
from peagle_tools.shared.checked_yaml import read_yaml
from tests.bench.standin.sweep import CLIENT, SERVER

SUITE = """\
name: trial
target: ./target
arms:
  none: {}
  EAGLE-3:
    speculative_config: {method: eagle3, model: ./eagle}
    k: [3, 7]
  P-EAGLE:
    speculative_config: {method: eagle3, model: ./peagle, parallel_drafting: true}
    k: [3, 7]
datasets:
  prompts:
    jsonl: ./prompts.jsonl
    prompts: 12
    output_tokens: 64
concurrency: [1, 4]
repeats: 2
warmups: 0
"""


@pytest.fixture
def suite_file(tmp_path: Path) -> Path:
    """The suite above, in a folder with everything that it names."""
    folder = tmp_path / "suite"
    for name in ("target", "eagle", "peagle"):
        (folder / name).mkdir(parents=True)
    (folder / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    file = folder / "trial.yaml"
    file.write_text(SUITE)
    return file


@pytest.fixture
def suite(suite_file: Path) -> Suite:
    return read_yaml(suite_file, Suite, "suite")


@pytest.fixture
def small_suite_file(suite_file: Path) -> Path:
    """Two arms, one depth: four server starts, eight cells."""
    text = suite_file.read_text()
    begin, end = text.index("  P-EAGLE:"), text.index("datasets:")
    suite_file.write_text((text[:begin] + text[end:]).replace("k: [3, 7]", "k: [3]"))
    return suite_file


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and the stand-ins for server and client, which write into ``log`` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STANDIN_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(server, "COMMAND", SERVER)
    monkeypatch.setattr(client, "COMMAND", CLIENT)
    return tmp_path
