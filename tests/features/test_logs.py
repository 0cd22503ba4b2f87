"""What the log says of drafts: one line at the start, nothing for other drafters.

And nothing of what users write, or are answered, stands in a log, at any level.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ARM
from tests.features.asking import SETTINGS, ask
from tests.support.engines import engine
from tests.support.models import EAGLE3

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

SECRET = "seven lanterns for the heron of Aldeburgh"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """All logs from DEBUG on, vLLM's too, of engines that start now; what is said once is said again."""
    engine(SETTINGS)  # the first engine of a process sets the log up
    from vllm import logger

    logger._print_info_once.cache_clear()
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.addHandler(caplog.handler)
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "vllm"):
        yield caplog
    vllm_logger.removeHandler(caplog.handler)


def log_lines(log: pytest.LogCaptureFixture) -> list[str]:
    """What the log holds of P-EAGLE."""
    return [message for message in log.messages if "P-EAGLE" in message]


def test_a_start_says_that_p_eagle_is_on(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    from vllm import logger
    from vllm.distributed import parallel_state

    from peagle_vllm.draft_log import log_start
    from peagle_vllm.serving import warn_once

    live = engine(replace(SETTINGS, max_num_seqs=3))  # an engine of its own, started at this level
    runner, graphs = ("V2", ", no graphs") if ARM == "plugin-v2" else ("V1", "")
    line, kv = f"P-EAGLE active: Model Runner {runner}, K=5, head trained 8 deep", "KV 2048 bytes a token"
    (start,) = log_lines(log)
    assert re.fullmatch(rf"{line}{graphs}, buffers \d\.\d MiB, {kv}", start)
    logger._print_info_once.cache_clear()
    drafter, parallel_config = live.drafter, live.runner.vllm_config.parallel_config
    monkeypatch.setattr(parallel_config, "data_parallel_rank_local", 1)
    log_start(drafter, live.runner.kv_cache_config)  # the second engine of a data parallel server
    monkeypatch.setattr(parallel_config, "data_parallel_rank_local", 0)
    with monkeypatch.context() as measuring:  # vLLM sizes CUDA graphs before it knows how many blocks there are
        measuring.setattr(live.runner.cache_config, "num_gpu_blocks", None)
        log_start(drafter, live.runner.kv_cache_config)
    with monkeypatch.context() as second:
        second.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
        log_start(drafter, live.runner.kv_cache_config)
        warn_once("a second rank warns")
    assert len(log_lines(log)) == 1 and "a second rank warns" not in log.messages
    monkeypatch.setattr(parallel_state, "is_local_first_rank", lambda: False)  # as on a later pipeline stage
    warn_once("the stage that drafts warns")
    assert log.messages[-1] == "the stage that drafts warns"
    monkeypatch.setattr(live.runner.vllm_config.scheduler_config, "max_num_batched_tokens", 15)
    few = r"2 of 3 requests at once \(max_num_batched_tokens\)"
    # A GPU's: the head without what it shares with its target, and all buffers, each once.
    monkeypatch.setattr(drafter, "device", SimpleNamespace(type="cuda"))
    fresh = SimpleNamespace(twice=[torch.zeros(10 << 18)] * 2)
    for history in (None, fresh):  # V1's
        monkeypatch.setattr(drafter, "history", history, raising=False)
        log_start(drafter, live.runner.kv_cache_config, num_graphs=253)
    tensors, of_target = (
        {x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers())}
        for model in (drafter.model, live.runner.get_model())
    )
    head = sum(size for place, size in tensors.items() if place not in of_target) / 2**20
    pattern = rf"{line}, 253 graphs, head {head:.1f} MiB, {few}, buffers (.+) MiB, {kv}"
    sizes = [re.fullmatch(pattern, x) for x in log_lines(log)]
    assert float(sizes[2][1]) == pytest.approx(float(sizes[1][1]) + 10)


@pytest.mark.arm("plugin-v1")
def test_other_engines_say_nothing(log: pytest.LogCaptureFixture):
    engine(replace(SETTINGS, head=EAGLE3, k=3, parallel_drafting=False, max_num_seqs=3)).run([ask(i) for i in range(3)])
    assert not log_lines(log)


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
