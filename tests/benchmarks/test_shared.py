"""What the scripts share: processes, samples, the timer, the profiler's names, and the probe in a live engine."""

import os
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from benchmarks import arms, probe, timing


def test_an_arm_runs_in_a_process_of_its_own_and_names_its_error(monkeypatch):
    """Arguments and result travel as JSON; nothing of another arm's environment is inherited."""
    monkeypatch.setenv("PEAGLE_VLLM_DISABLE", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pid, env = arms.run(probed, arms.V1, names=["PEAGLE_VLLM_DISABLE", "TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER"])
    assert pid != os.getpid()
    assert env == [None, None, "0"]
    with pytest.raises(arms.ArmError, match=r"^TypeError: .*'int' object is not iterable$"):
        arms.run(probed, {}, names=1)
    with pytest.raises(arms.ArmError, match="took longer than 0 s"):
        arms.run(probed, {}, timeout=0.01, names=[])


def probed(names: list[str]) -> tuple[int, list[str | None]]:
    """Run by the test above in another process."""
    return os.getpid(), [os.environ.get(name) for name in names]


def test_launches_are_told_apart_by_their_names():
    names = ["cuLaunchKernelEx", "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch", "cudaMemcpyAsync"]
    names += ["cudaMemsetAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::copy_", "cudaEventRecord"]
    calls = timing.count(names)
    assert calls == {"kernel_launches": 3, "graph_launches": 1, "copies": 2, "waits": 1}
    assert timing.as_text(calls) == "3k+1g+2c"


def test_on_a_gpu_the_timer_queues_the_call_behind_other_work(monkeypatch):
    cuda = MagicMock()
    cuda.Event.return_value.elapsed_time.return_value = 0.5  # milliseconds
    monkeypatch.setattr(timing.torch, "cuda", cuda)
    monkeypatch.setattr(timing, "HAS_GPU", True)
    timer = timing.Timer()
    timer.flush = cuda.flush
    times = timer.measure(cuda.call, repeats=2)
    assert times.device == [500.0, 500.0] and len(times.host) == 2
    order = [name for name, _, _ in cuda.mock_calls if name not in ("Event", "Event().elapsed_time")]
    timed = ["Event().record", "call", "Event().record"]
    again = ["synchronize", "flush.zero_", "_sleep", *timed, "synchronize"]
    assert order == [*5 * timed, "synchronize", *2 * again]


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
    with probe.watched(drafter, timing.Timer(), batch=2, k=3, repeats=2, warm=1) as steps:
        drafter.propose(decode(1, 4))  # not full
        for _ in range(probe.num_steps(2, 1)):
            assert drafter.propose(decode(2, 4)).shape == (2, 3)
    assert (len(steps.behind.device), len(steps.idle.device)) == (2, 2)
    assert "propose" not in vars(drafter)
    few = probe.watched(drafter, timing.Timer(), batch=2, k=3, repeats=2, warm=1)
    with pytest.raises(RuntimeError, match="only 1 decode steps with all 2 requests"), few:
        drafter.propose(decode(2, 4))
