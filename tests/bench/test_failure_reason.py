"""Why a process ended, out of logs as vLLM writes them."""

from pathlib import Path

import pytest

from peagle_tools.shared.processes import failure_reason, how_it_ended

PREFIX = "(EngineCore pid=120) ERROR 11-21 04:00:00 [core.py:900] "
LOGS = {
    "the root cause, not its echo": (
        [
            f"{PREFIX}Traceback (most recent call last):",
            f"{PREFIX}  raise RefusedError(text)",
            f"{PREFIX}peagle_vllm.serving.RefusedError: P-EAGLE refused: hidden_size is 96",
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
        ],
        "peagle_vllm.serving.RefusedError: P-EAGLE refused: hidden_size is 96",
    ),
    "pydantic's own words": (
        [
            "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
            "(APIServer pid=1)   Value error, K is too large for this head [type=value_error, input_value=..., ...]",
            "(APIServer pid=1)     For further information visit https://errors.pydantic.dev/2/v/value_error",
        ],
        "K is too large for this head",
    ),
    "a death without an error": (
        [
            "(APIServer pid=1) ERROR 11-21 04:08:31 [client.py:7] Engine core proc EngineCore died unexpectedly.",
            "(APIServer pid=1) ERROR 11-21 04:08:31 [x.py:1] EngineDeadError: EngineCore encountered an issue.",
            "INFO:     Application shutdown complete.",
            "resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked objects",
        ],
        "Engine core proc EngineCore died unexpectedly.",
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
