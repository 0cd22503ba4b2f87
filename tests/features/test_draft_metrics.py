"""That and how drafts ran, as vLLM's users see it: ``LLM.get_metrics()``, the log, nothing for other drafters."""

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.conftest import ARM
from tests.features.comparing import SETTINGS, Case, outputs
from tests.support.engines import Engine, Settings, engine
from tests.support.models import EAGLE3, TARGET

pytestmark = pytest.mark.arm("plugin-v1")

PREFIX = "vllm:peagle_draft_"
COUNTS = {"graph", "piecewise", "eager", "rows", "padding_rows"}
CASES = [Case(i, 12 + i) for i in range(3)]


def with_metrics(settings: Settings) -> Settings:
    return replace(settings, llm=(*settings.llm, ("disable_log_stats", False)))


def active(live: Engine) -> list[dict[str, str]]:
    """The labels of ``vllm:peagle_info``, of each engine that shows it."""
    found = [metric for metric in live.llm.get_metrics() if metric.name == "vllm:peagle_info"]
    assert all(metric.value == 1 for metric in found)
    return [metric.labels for metric in found]


def shown(live: Engine, names: Collection[str] = COUNTS) -> Counter[str]:
    """What the engine counted since it started, or its sizes, by mode or by what is left of the name."""
    found: Counter[str] = Counter()
    for metric in live.llm.get_metrics():
        if metric.name.startswith(PREFIX):
            assert metric.labels["engine"] == "0" and metric.labels["model_name"]
            name = metric.labels.get("mode", metric.name.removeprefix(PREFIX))
            if name in names:
                found[name] += metric.value
    return found


@contextmanager
def forwards(live: Engine) -> Iterator[list[int]]:
    """Rows of every forward of the drafter meanwhile."""
    rows: list[int] = []
    hook = live.drafter.model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        yield rows
    finally:
        hook.remove()


@pytest.mark.arm("plugin-v1", "plugin-v2")
def test_every_draft_step_counts_once():
    settings = with_metrics(SETTINGS)
    live = engine(settings)
    before = shown(live)
    assert before.keys() == COUNTS
    with forwards(live) as rows:
        outputs(settings, CASES)
    assert len(rows) > 5
    assert shown(live) - before == Counter(eager=len(rows), rows=sum(rows))
    with forwards(live) as rows:
        live.runner._dummy_run(4)
    assert rows
    assert not live.drafter.draft_stats.take(), "a dummy run serves nobody"


def test_piecewise_steps_and_their_padding(monkeypatch: pytest.MonkeyPatch):
    """On V1, vLLM's dispatcher decides; a CPU has no graphs, so here it says that there is one for each 64 rows."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor

    settings = with_metrics(SETTINGS)
    live = engine(settings)
    before = shown(live)
    monkeypatch.setattr(
        live.drafter.cudagraph_dispatcher,
        "dispatch",
        lambda rows, **_: (CUDAGraphMode.PIECEWISE, BatchDescriptor(-64 * (-rows // 64))),
    )
    with forwards(live) as rows:
        outputs(settings, CASES)
    assert all(count % 64 == 0 for count in rows)
    counts = shown(live) - before
    assert counts["piecewise"] == len(rows)
    assert counts["rows"] > 0 and counts["padding_rows"] > 0
    assert counts["rows"] + counts["padding_rows"] == sum(rows)


@pytest.mark.arm("plugin-v2")
def test_replays_count_as_graphs(log: pytest.LogCaptureFixture):
    from tests.support.graphs import emulate

    settings = with_metrics(SETTINGS)
    live = engine(settings)
    before = shown(live)
    with emulate(live, [4]) as seen:  # three requests, padded to four
        live.core.model_executor.driver_worker.worker.compile_or_warm_up_model()  # what follows capture
        sizes = live.drafter.sizes()
        outputs(settings, CASES)
    assert sizes["graphs"] == len(seen.captured) + len(seen.sizes) > 1 and sizes["buffer_bytes"] > 10_000
    megabytes = round(sizes["buffer_bytes"] / 1e6)
    assert said(log) == [
        f"P-EAGLE active: Model Runner V2, K=5, head trained 8 deep, {sizes['graphs']} graphs, {megabytes} MB"
    ]
    assert shown(live, sizes) == sizes
    counts = shown(live) - before
    assert seen.padded and seen.eager
    assert counts["graph"] == sum(seen.replayed.values())
    assert counts["eager"] == seen.eager
    replayed = sum(num_reqs * length * times for (num_reqs, length), times in seen.replayed.items())
    assert 0 < counts["padding_rows"] < replayed < counts["rows"] + counts["padding_rows"]


def said(log: pytest.LogCaptureFixture) -> list[str]:
    """What the log holds of P-EAGLE."""
    return [message for message in log.messages if "P-EAGLE" in message]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's log from INFO on, for engines that start now. In this process one drafted with P-EAGLE before."""
    engine(with_metrics(SETTINGS))  # the first engine of a process sets the log up
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, "vllm"):
        yield caplog
    vllm_logger.removeHandler(caplog.handler)


def lines(log: pytest.LogCaptureFixture, live: Engine) -> list[str]:
    """What the periodic log says now, of drafts."""
    log.clear()
    live.llm.llm_engine.do_log_stats()
    assert any("Avg generation throughput" in message for message in log.messages)
    return said(log)


@pytest.mark.arm("plugin-v1", "plugin-v2")
def test_a_start_says_that_p_eagle_is_on(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    settings = replace(with_metrics(SETTINGS), max_num_seqs=3)  # an engine of its own, started at this level
    live = engine(settings)
    runner, sizes = ("V2", ", no graphs, 0 MB") if ARM == "plugin-v2" else ("V1", "")
    assert said(log) == [f"P-EAGLE active: Model Runner {runner}, K=5, head trained 8 deep{sizes}"]
    assert active(live) == [
        {
            "model_name": str(TARGET),
            "engine": "0",
            "runner": runner,
            "num_speculative_tokens": "5",
            "trained_depth": "8",
        }
    ]
    log.clear()
    worker = live.core.model_executor.driver_worker.worker
    with monkeypatch.context() as patch:  # the second engine of a data parallel server
        patch.setattr(worker.parallel_config, "data_parallel_rank_local", 1)
        worker.compile_or_warm_up_model()
    assert not said(log)


def test_the_log_has_a_line_for_each_interval_that_drafted(log: pytest.LogCaptureFixture):
    from vllm.v1.metrics.stats import KV_FETCH_STAGES

    settings = replace(with_metrics(SETTINGS), max_num_seqs=3)  # an engine of its own, started at this level
    live = engine(settings)
    outputs(settings, CASES)
    counts = shown(live)
    assert lines(log, live) == [
        f"P-EAGLE drafting metrics: Steps: {counts['eager']} (graph: 0, piecewise: 0, eager: {counts['eager']}), "
        f"Rows: {counts['rows']}, Padding rows: 0"
    ]
    assert lines(log, live) == []
    _, vllms, _ = live.llm.llm_engine.logger_manager.stat_loggers
    last = vllms.per_engine_stat_loggers[0].last_scheduler_stats
    assert set(last.num_kv_fetch_reqs_by_stage) == set(KV_FETCH_STAGES), "vLLM's own loggers must not see our counts"


@pytest.mark.parametrize("head", [None, EAGLE3], ids=["none", "EAGLE-3"])
def test_other_engines_show_none_of_it(head, log: pytest.LogCaptureFixture):
    settings = with_metrics(replace(SETTINGS, head=head, k=3, parallel_drafting=False))
    live = engine(settings)
    assert not said(log) and not active(live)
    outputs(settings, CASES)
    assert any(metric.name.startswith("vllm:spec_decode") for metric in live.llm.get_metrics()) == (head is not None)
    assert not shown(live)
    assert not lines(log, live)
    assert len(live.llm.llm_engine.logger_manager.stat_loggers) == 2, "vLLM's log and its Prometheus counters"


def test_counts_cross_from_engine_core_to_front_end():
    """vLLM encodes statistics as declared: of a SchedulerStats only what is declared arrives."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from peagle_vllm.draft_stats import load, unload

    stats = SchedulerStats()
    load({"graph": 1, "rows": 10}, stats)
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    received = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    assert unload(received) == {"graph": 1, "rows": 10}
    assert received == SchedulerStats()
