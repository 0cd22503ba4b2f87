"""What the scripts share: environments, tables, the profiler's names, and the probe of draft steps."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from benchmarks import arms, probe


def test_nothing_of_another_arms_environment_is_inherited(monkeypatch):
    monkeypatch.setenv("PEAGLE_VLLM_DISABLE", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    env = arms.environment(arms.V1)
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "0" and not {"PEAGLE_VLLM_DISABLE", "TRITON_INTERPRET"} & env.keys()


def test_launches_are_told_apart_by_their_names():
    names = ["cuLaunchKernelEx", "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch", "cudaMemcpyAsync"]
    names += ["cudaMemsetAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::copy_", "cudaEventRecord"]
    assert probe.count(names) == {"kernel_launches": 3, "graph_launches": 1, "copies": 2, "waits": 1}


def test_a_table_shows_every_cell():
    """A summary by its median and spread; a key that only some cells have is empty in the others."""
    cells = [{"arm": "a", "us": arms.summary([1.0, 2.0, 3.0])}, {"arm": "other", "bytes": 12345}]
    assert arms.table(cells).splitlines() == [
        "arm    us           bytes",
        "a      2 (1.2-2.8)",
        "other               12,345",
    ]


def test_on_a_gpu_a_step_is_queued_behind_other_work(monkeypatch):
    cuda = MagicMock()
    cuda.Event.return_value.elapsed_time.return_value = 0.5  # milliseconds
    monkeypatch.setattr(probe.torch, "cuda", cuda)
    monkeypatch.setattr(probe, "HAS_GPU", True)
    monkeypatch.setattr(probe, "profiled", lambda call: (call(), {"kernel_launches": 1}))
    drafter = SimpleNamespace(propose=cuda.propose)
    with probe.watched(drafter, batch=2, k=3, repeats=1, warm=1) as steps:
        for _ in range(probe.num_steps(1, 1)):
            drafter.propose(decode(2, 4))
    assert steps.device == [500.0] and len(steps.host) == 1 and steps.traced == {"kernel_launches": 1}
    order = [name for name, _, _ in cuda.mock_calls if name not in ("Event", "Event().elapsed_time")]
    behind = ["_sleep", "Event().record", "propose", "Event().record"]
    assert order == ["propose", *behind, "synchronize", "propose", "propose", "synchronize"]


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
    with probe.watched(drafter, batch=2, k=3, repeats=2, warm=1) as steps:
        drafter.propose(decode(1, 4))  # not full
        for _ in range(probe.num_steps(2, 1)):
            assert drafter.propose(decode(2, 4)).shape == (2, 3)
    assert (len(steps.device), len(steps.host)) == (2, 2)
    assert "propose" not in vars(drafter)
    few = probe.watched(drafter, batch=2, k=3, repeats=2, warm=1)
    with pytest.raises(RuntimeError, match="only 1 decode steps with all 2 requests"), few:
        drafter.propose(decode(2, 4))
