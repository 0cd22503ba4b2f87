"""The way of the counts, hop by hop, without vLLM. ``features/test_draft_metrics.py`` walks it in engines."""

import copy
import pickle
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from peagle_vllm.draft_stats import CARRIER, DraftStats, load, unload
from peagle_vllm.patches import draft_metrics

COUNTS = {"graph": 1, "eager": 1, "rows": 90, "padding_rows": 6}


@dataclass
class Output:
    """Stands for ModelRunnerOutput: a dataclass, pickled between worker and engine core."""

    req_ids: tuple[str, ...] = ()


def noted() -> DraftStats:
    stats = DraftStats()
    stats.note("FULL", 60, 6)
    stats.note("NONE", 30, 0)
    return stats


def module(**classes: type) -> ModuleType:
    stand_in = ModuleType("vllm.stand_in")
    vars(stand_in).update(classes)
    return stand_in


def statistics() -> SimpleNamespace:
    return SimpleNamespace(**{CARRIER: {"pending": 2}})


@dataclass
class Scheduler:
    sends: list[Any] = field(default_factory=list)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        return {client: SimpleNamespace(scheduler_stats=stats) for client, stats in enumerate(self.sends)}


def scheduler(*sends: Any) -> Scheduler:
    wrapped = module(Scheduler=type("Scheduler", (Scheduler,), {}))
    draft_metrics.install_scheduler(wrapped)
    return wrapped.Scheduler(list(sends))


def test_counts_are_taken_once() -> None:
    stats = noted()
    assert stats.take() == COUNTS
    assert stats.take() == {}


def test_sizes_go_out_once_with_the_first_counts() -> None:
    stats = DraftStats()
    stats.sizes = {"graphs": 3, "buffer_bytes": 10}
    assert stats.take() == {}
    stats.note("FULL", 60, 6)
    carried = statistics()
    load(stats.take(), carried)
    assert unload(carried) == {"graph": 1, "rows": 60, "padding_rows": 6, "graphs": 3, "buffer_bytes": 10}
    assert carried == statistics()
    stats.note("FULL", 60, 6)
    assert stats.take().keys() == {"graph", "rows", "padding_rows"}


@pytest.mark.parametrize(
    ("drafter", "held_as"),
    [("speculator", "model_runner_output"), ("drafter", "_model_runner_output")],
    ids=["V2", "V1"],
)
@pytest.mark.parametrize("is_async", [False, True], ids=["", "asynchronous"])
def test_counts_ride_with_the_output_of_their_step(drafter: str, held_as: str, is_async: bool) -> None:
    class GPUModelRunner:
        def sample_tokens(self, grammar_output: None) -> Any:
            output = Output(("a",))
            return SimpleNamespace(**{held_as: output}) if is_async else output

    draft_metrics.install_worker(module(GPUModelRunner=GPUModelRunner))
    runner = GPUModelRunner()

    def step() -> Output:
        output = runner.sample_tokens(None)
        return pickle.loads(pickle.dumps(getattr(output, held_as) if is_async else output))

    assert vars(step()) == {"req_ids": ("a",)}, "no drafter"
    setattr(runner, drafter, SimpleNamespace())
    assert vars(step()) == {"req_ids": ("a",)}, "a drafter of vLLM"
    setattr(runner, drafter, SimpleNamespace(draft_stats=noted()))
    stats = statistics()
    scheduler(stats).update_from_output(None, step())
    assert unload(stats) == COUNTS
    assert vars(step()) == {"req_ids": ("a",)}, "a step without drafts"


def test_the_scheduler_gives_the_counts_to_one_front_end() -> None:
    output = Output()
    output.peagle_draft_counts = COUNTS  # type: ignore[attr-defined]
    silent, first, second = None, statistics(), statistics()
    scheduler(silent, first, second).update_from_output(None, output)
    assert unload(second) == {}
    assert unload(first) == COUNTS
    assert first == statistics(), "vLLM's own statistics must come out as they went in"


def test_the_scheduler_drops_the_counts_where_statistics_are_off() -> None:
    output = Output()
    output.peagle_draft_counts = COUNTS  # type: ignore[attr-defined]
    assert scheduler(None).update_from_output(None, copy.copy(output))[0].scheduler_stats is None
