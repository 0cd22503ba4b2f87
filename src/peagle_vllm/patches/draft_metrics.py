"""Brings the draft steps that workers count to ``/metrics``, the log and ``LLM.get_metrics()``."""

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from peagle_vllm.draft_stats import load
from peagle_vllm.patches.ledger import Seam
from peagle_vllm.patches.patching import wrap
from peagle_vllm.serving import is_peagle, what_is_served

logger = logging.getLogger("vllm.peagle")  # under vLLM's own handler

SEAM = Seam(
    name="draft-metrics",
    runner="both",
    why="vLLM counts drafted and accepted tokens in the scheduler; how a draft batch ran is known in the worker only, "
    "and vLLM has no channel for it. The counts are attached to the step's output, which is pickled, then put into a "
    "dict of the scheduler's statistics, which are sent as declared.",
    waits_for="statistics of a drafter in ModelRunnerOutput and SchedulerStats",
    delete_when="a speculator can report its own metrics",
    types={
        "output": (  # what sample_tokens returns when scheduling is asynchronous
            "vllm.v1.worker.gpu.async_utils:AsyncOutput",
            "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput",
        ),
        "each": ("vllm.v1.engine:EngineCoreOutputs",),
        "stat_logger": ("vllm.v1.metrics.loggers:PerEngineStatLoggerAdapter",),
    },
    also={
        "vllm.v1.metrics.stats": ("SchedulerStats.num_kv_fetch_reqs_by_stage",),  # draft_stats.CARRIER
        "vllm.v1.metrics.loggers": ("StatLoggerManager.record", "StatLoggerManager.log"),  # call our logger
    },
)

_COUNTS = "peagle_draft_counts"  # set on a ModelRunnerOutput


def install_gpu_worker(module: ModuleType) -> None:
    wrap(module.Worker, "compile_or_warm_up_model", _then_announce)


def install_cpu_worker(module: ModuleType) -> None:
    wrap(module.CPUWorker, "compile_or_warm_up_model", _then_announce)


def _then_announce(original: Callable[..., Any]) -> Callable[..., Any]:
    """The last step of a worker's start, then one line in the log if it drafts with P-EAGLE."""

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        drafter = _drafter(self.model_runner)
        if drafter is not None:
            sizes = drafter.draft_stats.sizes = drafter.sizes() if hasattr(drafter, "sizes") else {}
            if _speaks_for_all(self.parallel_config):
                logger.info("P-EAGLE active: %s", _described(what_is_served(self.vllm_config), sizes))
        return result

    return compile_or_warm_up_model


def _drafter(runner: Any) -> Any | None:
    """P-EAGLE's drafter of a runner, of V2 or V1."""
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    return drafter if hasattr(drafter, "draft_stats") else None


def _speaks_for_all(parallel_config: Any) -> bool:
    """Whether this is the first of the ranks on this machine that draft."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().rank_in_group == 0 and not parallel_config.data_parallel_rank_local


def _described(served: dict[str, str], sizes: dict[str, int]) -> str:
    parts = [f"Model Runner {served['runner']}", f"K={served['num_speculative_tokens']}"]
    if served["trained_depth"]:
        parts.append(f"head trained {served['trained_depth']} deep")
    if sizes:
        parts.append(f"{sizes['graphs'] or 'no'} graphs")
        parts.append(f"{sizes['buffer_bytes'] / 1e6:.0f} MB")
    return ", ".join(parts)


def install_worker(module: ModuleType) -> None:
    """Put the counts of a step on its ``ModelRunnerOutput``, in the runner of V2 or V1."""

    def make(original):
        def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            drafter = _drafter(self)
            if drafter is not None and (counts := drafter.draft_stats.take()):
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

                self.stat_loggers.insert(0, DraftStatLogger(self.stat_loggers, what_is_served(vllm_config)))

        return __init__

    wrap(module.StatLoggerManager, "__init__", make)
