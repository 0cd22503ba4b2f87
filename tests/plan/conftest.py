"""The synthetic suite of tests/bench, and its stand-ins for server and client in this process."""

from pathlib import Path

import pytest

from peagle_vllm.bench import client, server
from tests.bench.conftest import suite_file as suite_file
from tests.bench.standin.sweep import CLIENT, SERVER


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder; the stand-ins write into ``log`` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STANDIN_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(server, "COMMAND", SERVER)
    monkeypatch.setattr(client, "COMMAND", CLIENT)
    return tmp_path
