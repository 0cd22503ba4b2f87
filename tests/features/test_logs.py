"""Nothing of what users write, or are answered, stands in a log, at any level."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.features.comparing import SETTINGS
from tests.support.engines import engine

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

SECRET = "seven lanterns for the heron of Aldeburgh"


class Kept(logging.Handler):
    """Every record as it would be written, tracebacks included."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def everything_logged() -> Iterator[list[str]]:
    """All records of all loggers meanwhile, from DEBUG on."""
    handler, loggers = Kept(), [logging.getLogger(), logging.getLogger("vllm")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.addHandler(handler)
            logger.setLevel(logging.DEBUG)
        yield handler.lines
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def holds(text: str, ids: list[int]) -> bool:
    """Whether four of these token ids stand in the text one after the other, however they are separated."""
    numbers = f" {' '.join(re.findall('[0-9]+', text))} "
    return any(f" {' '.join(map(str, ids[i : i + 4]))} " in numbers for i in range(len(ids) - 3))


def test_prompts_and_answers_stand_in_no_log(capfd: pytest.CaptureFixture[str]):
    from vllm import SamplingParams, logger

    engine(SETTINGS)  # the first engine of a process sets the log up
    logger._print_info_once.cache_clear()
    settings = replace(SETTINGS, max_num_seqs=3, llm=(*SETTINGS.llm, ("disable_log_stats", False)))
    with everything_logged() as lines:
        live = engine(settings)
        params = [SamplingParams(temperature=t, max_tokens=24, ignore_eos=True) for t in (0.0, 1.0)]
        answers = [live.llm.generate([f"{SECRET} {i}"], p, use_tqdm=False)[0] for i, p in enumerate(params)]
        live.llm.llm_engine.do_log_stats()
    written = "\n".join([*lines, *capfd.readouterr()])
    assert "P-EAGLE active" in written
    assert any("DEBUG" in line or "Engine" in line for line in lines), "debug lines are kept"
    for answer in answers:
        assert len(answer.prompt_token_ids) > 8
        assert answer.outputs[0].text not in written
        assert not holds(written, list(answer.prompt_token_ids))
        assert not holds(written, list(answer.outputs[0].token_ids))
    for words in (SECRET, "lanterns", "Aldeburgh"):
        assert words not in written
