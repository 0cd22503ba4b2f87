"""Why a process ended, out of logs as vLLM writes them; test_sweep.py has more such."""

from pathlib import Path

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
