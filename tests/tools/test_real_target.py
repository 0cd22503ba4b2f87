"""Without the package index, one line says that the real target cannot be made."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_without_the_index_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left. A hash that is not the file's is refused by pip itself."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name, value in {"PIP_RETRIES": "0", "PIP_TIMEOUT": "1", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "tools.real_target", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("pip's index does not give the wheels of real.txt (ERROR: No matching")
    assert list((tmp_path / "cache").iterdir()) == []
