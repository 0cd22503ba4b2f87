"""Nothing of what users write, or are answered, stands in a log, at any level."""

import re
from dataclasses import replace

import pytest

from tests.features.comparing import SETTINGS
from tests.support.engines import engine

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

SECRET = "seven lanterns for the heron of Aldeburgh"


def holds(text: str, ids: list[int]) -> bool:
    """Whether four of these token ids stand in the text one after the other, however they are separated."""
    numbers = f" {' '.join(re.findall('[0-9]+', text))} "
    return any(f" {' '.join(map(str, ids[i : i + 4]))} " in numbers for i in range(len(ids) - 3))


def test_prompts_and_answers_stand_in_no_log(log: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    from vllm import SamplingParams

    live = engine(replace(SETTINGS, max_num_seqs=3, llm=(*SETTINGS.llm, ("disable_log_stats", False))))
    params = [SamplingParams(temperature=t, max_tokens=24, ignore_eos=True) for t in (0.0, 1.0)]
    answers = [live.llm.generate([f"{SECRET} {i}"], p, use_tqdm=False)[0] for i, p in enumerate(params)]
    live.llm.llm_engine.do_log_stats()
    written = "\n".join([log.text, *capfd.readouterr()])  # tracebacks included
    assert "P-EAGLE active" in written
    assert any(record.levelname == "DEBUG" or "Engine" in record.getMessage() for record in log.records)
    for answer in answers:
        assert len(answer.prompt_token_ids) > 8
        assert answer.outputs[0].text not in written
        assert not holds(written, list(answer.prompt_token_ids))
        assert not holds(written, list(answer.outputs[0].token_ids))
    for words in (SECRET, "lanterns", "Aldeburgh"):
        assert words not in written
