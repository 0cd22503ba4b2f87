"""Why a process ended, out of logs as vLLM writes them; test_sweep.py has more such."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from peagle_tools.shared.processes import failure_reason, how_it_ended

LOGS = {
    "pydantic's own words": (
        [
            "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
            "(APIServer pid=1)   Value error, K is too large for this head [type=value_error, input_value=..., ...]",
            "(APIServer pid=1)     For further information visit https://errors.pydantic.dev/2/v/value_error",
        ],
        "K is too large for this head",
    ),
    "a rank's error before a warning": (
        ["[rank0]: ValueError: no such backend", "WARNING 11-26 04:00:00 [a.py:1] Tokenizer not available"],
        "ValueError: no such backend",
    ),
    "only an echo": (["x.EngineDeadError: EngineCore encountered an issue.", "bye"], "x.EngineDeadError: EngineCore"),
    "no error at all": (["one", "two", ""], "two"),
    "nothing": ([], "it wrote nothing"),
}


@pytest.mark.parametrize("name", LOGS)
def test_failure_reason(name: str, tmp_path: Path) -> None:
    lines, words = LOGS[name]
    log = tmp_path / "log"
    log.write_text("\n".join(lines))
    assert failure_reason(log).startswith(words)


def test_how_it_ended() -> None:
    assert [how_it_ended(status) for status in (1, -9)] == ["exit status 1", "killed by SIGKILL"]


def test_what_loses_a_sigterm_is_killed_after_its_parent(tmp_path: Path) -> None:
    """As vLLM loses one that comes while its engine starts."""
    deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
    starts = f"""
import sys, time
from pathlib import Path
from peagle_tools.shared import processes

processes.PATIENCE = 0.1
processes.start([sys.executable, "-c", {deaf!r}], cwd=Path.cwd(), env={{}}, log=Path({str(tmp_path / "log")!r}))
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", starts])
    while not (pid := (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
        assert parent.poll() is None
        time.sleep(0.1)
    child = psutil.Process(int(pid))
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs([child], 20)[1]
