"""What ``DraftStats`` counted, shown beside vLLM's own metrics: on ``/metrics`` and in the periodic log."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import (
    AggregateStatLoggerBase,
    LoggingStatLogger,
    PerEngineStatLoggerAdapter,
    PrometheusStatLogger,
)

from peagle_vllm.draft_stats import COUNTS, MODES, SIZES, unload

logger = init_logger("vllm.peagle")


class DraftStatLogger(AggregateStatLoggerBase):
    """Takes our counts out of vLLM's statistics and shows them. Runs before all other loggers: they see none."""

    def __init__(self, others: Iterable[Any], served: Mapping[str, str]):
        """Metrics like those of vLLM's Prometheus logger among ``others``; a log line if they log one.

        Args:
            served: what ``serving.what_is_served`` says: the labels of ``vllm:peagle_info``.
        """
        others = list(others)
        inner = [each for other in others for each in _per_engine(other)]
        self._writes_log = any(isinstance(each, LoggingStatLogger) for each in inner)
        self._interval: Counter[str] = Counter()

        prometheus: PrometheusStatLogger = next(each for each in others if isinstance(each, PrometheusStatLogger))
        counter_class, gauge_class, labels = prometheus._counter_cls, prometheus._gauge_cls, ["model_name", "engine"]
        info = gauge_class(
            name="vllm:peagle_info",
            documentation="1: this engine drafts with P-EAGLE, on this runner.",
            multiprocess_mode="mostrecent",
            labelnames=[*labels, *served],
        )
        graphs, buffer_bytes = (
            gauge_class(name=name, documentation=says, multiprocess_mode="mostrecent", labelnames=labels)
            for name, says in (
                ("vllm:peagle_draft_graphs", "CUDA graphs captured for P-EAGLE drafts."),
                ("vllm:peagle_draft_buffer_bytes", "Buffers of P-EAGLE drafts, the graphs' own memory apart."),
            )
        )
        steps = counter_class(
            name="vllm:peagle_draft_steps",
            documentation="P-EAGLE draft steps, by how the drafter ran: as one CUDA graph, with piecewise graphs, "
            "or eagerly.",
            labelnames=[*labels, "mode"],
        )
        rows = counter_class(
            name="vllm:peagle_draft_rows",
            documentation="Rows of requests in P-EAGLE draft batches.",
            labelnames=labels,
        )
        padding_rows = counter_class(
            name="vllm:peagle_draft_padding_rows",
            documentation="Rows computed beside them, to fill up a CUDA graph or to match other data parallel ranks.",
            labelnames=labels,
        )
        self._counters = {
            engine: {mode: steps.labels(*values, mode) for mode in MODES}
            | {"rows": rows.labels(*values), "padding_rows": padding_rows.labels(*values)}
            for engine, values in prometheus.per_engine_labelvalues.items()
        }
        self._sizes = {  # a child of its own only once its engine has reported
            engine: {"graphs": partial(graphs.labels, *values), "buffer_bytes": partial(buffer_bytes.labels, *values)}
            for engine, values in prometheus.per_engine_labelvalues.items()
        }
        for values in prometheus.per_engine_labelvalues.values():
            info.labels(*values, *served.values()).set(1)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is None:
            return
        for name, number in unload(scheduler_stats).items():
            if name in SIZES:
                self._sizes[engine_idx][name]().set(number)
            else:
                self._interval[name] += number
                self._counters[engine_idx][name].inc(number)

    def log(self) -> None:
        counts, self._interval = self._interval, Counter()
        if not (counts and self._writes_log):
            return
        logger.info(
            "P-EAGLE drafting metrics: Steps: %d (graph: %d, piecewise: %d, eager: %d), Rows: %d, Padding rows: %d",
            sum(counts[mode] for mode in MODES),
            *(counts[name] for name in COUNTS),
        )

    def log_engine_initialized(self) -> None:
        pass


def _per_engine(stat_logger: Any) -> list[Any]:
    if isinstance(stat_logger, PerEngineStatLoggerAdapter):
        return list(stat_logger.per_engine_stat_loggers.values())
    return [stat_logger]
