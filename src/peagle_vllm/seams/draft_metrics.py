"""What workers count of their draft steps reaches ``/metrics``, the log and ``LLM.get_metrics()``."""

from types import ModuleType
from typing import Any

from peagle_vllm.draft_stats import load
from peagle_vllm.seams.ledger import Seam, touches
from peagle_vllm.seams.patching import wrap
from peagle_vllm.serving import is_peagle

SEAM = Seam(
    name="draft-metrics",
    runner="both",
    why="vLLM counts drafted and accepted tokens in the scheduler; how a draft batch ran is known in the worker only, "
    "and nothing of a drafter travels from there. The counts ride with the step's output, which is pickled, and then "
    "in a dict of the scheduler's statistics, which are sent as declared.",
    waits_for="statistics of a drafter in ModelRunnerOutput and SchedulerStats",
    delete_when="a speculator can report its own metrics",
    touches=(
        *touches("vllm.v1.worker.gpu.model_runner", "wrapped", "sample_tokens", of="GPUModelRunner", what="signature"),
        *touches("vllm.v1.worker.gpu_model_runner", "wrapped", "sample_tokens", of="GPUModelRunner", what="signature"),
        *touches("vllm.v1.worker.gpu.async_utils", "called", "model_runner_output", of="AsyncOutput"),
        *touches("vllm.v1.worker.gpu_model_runner", "called", "_model_runner_output", of="AsyncGPUModelRunnerOutput"),
        *touches("vllm.v1.core.sched.scheduler", "wrapped", "update_from_output", of="Scheduler", what="signature"),
        *touches("vllm.v1.engine", "called", "scheduler_stats", of="EngineCoreOutputs", what="signature"),
        *touches("vllm.v1.metrics.stats", "called", "num_kv_fetch_reqs_by_stage", of="SchedulerStats"),
        *touches("vllm.v1.metrics.loggers", "wrapped", "__init__", of="StatLoggerManager"),
        *touches("vllm.v1.metrics.loggers", "called", "record", "log", of="StatLoggerManager"),
        *touches("vllm.v1.metrics.loggers", "inherited", "AggregateStatLoggerBase", what="signature"),
        *touches(
            "vllm.v1.metrics.loggers",
            "called",
            "LoggingStatLogger",
            "PerEngineStatLoggerAdapter",
            "PrometheusStatLogger",
            what="signature",
        ),
        *touches("vllm.v1.metrics.loggers", "called", "per_engine_stat_loggers", of="PerEngineStatLoggerAdapter"),
        *touches(
            "vllm.v1.metrics.loggers", "called", "_counter_cls", "per_engine_labelvalues", of="PrometheusStatLogger"
        ),
    ),
)

_COUNTS = "peagle_draft_counts"  # set on a ModelRunnerOutput


def install(module: ModuleType) -> None:
    """Take up the counts in a worker, pass them on in the scheduler, or show them in a front end."""
    installers = {
        "vllm.v1.worker.gpu.model_runner": _install_v2_worker,
        "vllm.v1.worker.gpu_model_runner": _install_v1_worker,
        "vllm.v1.core.sched.scheduler": _install_scheduler,
        "vllm.v1.metrics.loggers": _install_front_end,
    }
    installers[module.__name__](module)


def _install_v2_worker(module: ModuleType) -> None:
    _install_worker(module, drafter="speculator", held_as="model_runner_output")


def _install_v1_worker(module: ModuleType) -> None:
    _install_worker(module, drafter="drafter", held_as="_model_runner_output")


def _install_worker(module: ModuleType, drafter: str, held_as: str) -> None:
    """``held_as`` is where an asynchronous output keeps the ``ModelRunnerOutput`` that it will hand over."""

    def make(original):
        def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            stats = getattr(getattr(self, drafter, None), "draft_stats", None)
            if stats is not None and (counts := stats.take()):
                setattr(getattr(output, held_as, output), _COUNTS, counts)
            return output

        return sample_tokens

    wrap(module.GPUModelRunner, "sample_tokens", make)


def _install_scheduler(module: ModuleType) -> None:
    def make(original):
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = original(self, scheduler_output, model_runner_output, *args, **kwargs)
            if counts := getattr(model_runner_output, _COUNTS, None):
                # vLLM gives a step's statistics to one front end, and to none where they are switched off.
                stats = next((each.scheduler_stats for each in outputs.values() if each.scheduler_stats), None)
                if stats is not None:
                    load(counts, stats)
            return outputs

        return update_from_output

    wrap(module.Scheduler, "update_from_output", make)


def _install_front_end(module: ModuleType) -> None:
    def make(original):
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            if is_peagle(vllm_config):
                from peagle_vllm.draft_logger import DraftStatLogger

                self.stat_loggers.insert(0, DraftStatLogger(self.stat_loggers))

        return __init__

    wrap(module.StatLoggerManager, "__init__", make)
