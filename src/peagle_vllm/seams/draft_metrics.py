"""Brings the draft steps that workers count to ``/metrics``, the log and ``LLM.get_metrics()``."""

from types import ModuleType
from typing import Any

from peagle_vllm.draft_stats import load
from peagle_vllm.seams.ledger import Seam
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
    types={
        "output": (  # what sample_tokens returns when scheduling is asynchronous
            "vllm.v1.worker.gpu.async_utils:AsyncOutput",
            "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput",
        ),
        "outputs": ("vllm.v1.engine:EngineCoreOutputs",),
    },
    also={
        "vllm.v1.metrics.stats": ("SchedulerStats.num_kv_fetch_reqs_by_stage",),  # draft_stats.CARRIER
        "vllm.v1.metrics.loggers": ("StatLoggerManager.record", "StatLoggerManager.log"),  # call our logger
    },
)

_COUNTS = "peagle_draft_counts"  # set on a ModelRunnerOutput


def install_worker(module: ModuleType) -> None:
    """Put the counts of a step on its ``ModelRunnerOutput``, in the runner of V2 or V1."""

    def make(original):
        def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            drafter = getattr(self, "speculator", None) or getattr(self, "drafter", None)
            stats = getattr(drafter, "draft_stats", None)
            if stats is not None and (counts := stats.take()):
                # An asynchronous output of V2, or of V1, holds the ModelRunnerOutput.
                held = getattr(output, "model_runner_output", None) or getattr(output, "_model_runner_output", output)
                setattr(held, _COUNTS, counts)
            return output

        return sample_tokens

    wrap(module.GPUModelRunner, "sample_tokens", make)


def install_scheduler(module: ModuleType) -> None:
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


def install_front_end(module: ModuleType) -> None:
    def make(original):
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            if is_peagle(vllm_config):
                from peagle_vllm.draft_logger import DraftStatLogger

                self.stat_loggers.insert(0, DraftStatLogger(self.stat_loggers))

        return __init__

    wrap(module.StatLoggerManager, "__init__", make)
