"""What the scripts share: processes, samples, both timers, the profiler's names, and the probe in a live engine."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import arms, probe, timing
from benchmarks.launches import count, shown


def test_an_arm_that_fails_says_why_in_one_line():
    with pytest.raises(arms.ArmError) as failure:
        arms.run("benchmarks.dispatches", ["--here", "no such arm"], {})
    assert "invalid choice" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_the_reason_is_the_exception_and_not_what_a_dying_process_writes():
    stderr = """Traceback (most recent call last):
      File "x.py", line 1
    pydantic_core.ValidationError: 1 validation error for ModelConfig
      max_model_len must be positive
    """
    said = "pydantic_core.ValidationError: 1 validation error for ModelConfig max_model_len must be positive"
    assert arms._reason(stderr, "noise") == said
    assert arms._reason("", "one\ntwo\n") == "two"
    assert arms._reason("", "") == ""


def test_an_arm_inherits_no_other_arms_environment(monkeypatch):
    asked = {}
    monkeypatch.setenv("PEAGLE_VLLM_DISABLE", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def process(command, env, **kwargs):
        asked.update(env)
        return SimpleNamespace(returncode=0, stdout=f"noise\n{arms.MARK}[1]\nmore", stderr="")

    monkeypatch.setattr(arms.subprocess, "run", process)
    assert arms.run("x", [], arms.V1) == [1]
    assert not {"PEAGLE_VLLM_DISABLE", "TRITON_INTERPRET"} & set(asked)
    assert asked["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_summary():
    assert arms.summary([3.0, 1.0, 2.0]) == {"median": 2.0, "p10": 1.2, "p90": 2.8, "samples": [3.0, 1.0, 2.0]}
    assert arms.summary([1.0])["p90"] == 1.0


def test_merged_reaches_into_dictionaries():
    both = arms.merged({"a": 1, "c": {"x": 1, "y": 2}}, {"b": 2, "c": {"y": 3}})
    assert both == {"a": 1, "b": 2, "c": {"x": 1, "y": 3}}


def test_a_table_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(arms, "HAS_GPU", False)
    assert arms.heading("columns").startswith("not a GPU result")
    monkeypatch.setattr(arms, "HAS_GPU", True)
    assert arms.heading("columns") == "columns"


def test_launches_are_told_apart_by_their_names():
    names = ["cuLaunchKernelEx", "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch", "cudaMemcpyAsync"]
    names += ["cudaMemsetAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::copy_", "cudaEventRecord"]
    calls = count(names)
    assert calls == {"kernel_launches": 3, "graph_launches": 1, "copies": 2, "waits": 1}
    assert shown(calls) == "3k+1g+2c"


class FakeCuda:
    """Stands for ``torch.cuda``: notes the order of what is queued."""

    def __init__(self):
        self.log: list[str] = []
        cuda = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                cuda.log.append("event")

            def elapsed_time(self, end):
                return 0.5  # milliseconds

        self.Event = Event

    def synchronize(self):
        self.log.append("wait")

    def _sleep(self, cycles):
        assert isinstance(cycles, int)
        assert cycles > 0
        self.log.append("sleep")


def test_cuda_timer_queues_the_call_behind_other_work(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(timing.torch, "cuda", fake)
    clock = timing.CudaTimer()
    clock.flush = SimpleNamespace(zero_=lambda: fake.log.append("flush"))
    timed = clock.measure(lambda: fake.log.append("call"), repeats=2)
    assert timed.device == [500.0, 500.0]
    assert len(timed.host) == 2
    warm = 5 * ["event", "call", "event"] + ["wait"]
    assert fake.log == warm + 2 * ["wait", "flush", "sleep", "event", "call", "event", "wait"]


def test_wall_timer_measures_the_same_way():
    timed = timing.WallTimer().measure(lambda: None, repeats=3)
    assert len(timed.device) == len(timed.host) == 3


def decode(batch: int, rows: int):
    """``propose``'s first argument on V2."""
    return SimpleNamespace(num_reqs=batch, num_scheduled_tokens=np.full(batch, rows))


def test_full_decode_batches_are_recognised_on_both_runners():
    for batch, rows, full in ((4, 4, True), (3, 4, False), (4, 9, False)):
        assert probe.is_full_decode((decode(batch, rows),), {}, 4, 3) == full
        cad = SimpleNamespace(batch_size=lambda batch=batch: batch, max_query_len=rows)
        assert probe.is_full_decode((), {"common_attn_metadata": cad}, 4, 3) == full
    assert not probe.is_full_decode((), {"input_batch": decode(4, 4), "dummy_run": True}, 4, 3)


class Drafter:
    def propose(self, input_batch):
        return torch.zeros(input_batch.num_reqs, 3)


def test_probe_sees_each_kind_of_step_and_goes_away():
    drafter = Drafter()
    with probe.watched(drafter, timing.WallTimer(), batch=2, k=3, repeats=2, warm=1) as steps:
        drafter.propose(decode(1, 4))  # not full
        for _ in range(probe.num_steps(2, 1)):
            assert drafter.propose(decode(2, 4)).shape == (2, 3)
    assert (len(steps.behind.device), len(steps.idle.device)) == (2, 2)
    assert "propose" not in vars(drafter)


def test_probe_says_when_steps_were_missing():
    drafter = Drafter()
    with (
        pytest.raises(RuntimeError, match="only 1 decode steps with all 2 requests"),
        probe.watched(drafter, timing.WallTimer(), batch=2, k=3, repeats=2, warm=1),
    ):
        drafter.propose(decode(2, 4))
