"""What the scripts share: environments, tables, and draft steps."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from benchmarks import arms, timing
from benchmarks.kernels import moved_bytes
from benchmarks.shapes import HeadShape
from peagle_kernels.layout import DraftBatch


def test_nothing_of_another_arms_environment_is_inherited(monkeypatch):
    monkeypatch.setenv("PEAGLE_VLLM_DISABLE", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    env = arms.environment(arms.V1)
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "0" and not {"PEAGLE_VLLM_DISABLE", "TRITON_INTERPRET"} & env.keys()


def test_a_table_shows_every_cell():
    """A summary by its median and spread; a key that only some cells have is empty in the others."""
    cells = [{"arm": "a", "us": arms.summary([1.0, 2.0, 3.0])}, {"arm": "other", "bytes": 12345}]
    lines = ["arm    us           bytes", "a      2 (1.2-2.8)", "other               12,345"]
    assert arms.table(cells).splitlines() == lines


def test_on_a_gpu_a_step_is_queued_behind_other_work(monkeypatch):
    cuda = MagicMock()
    cuda.Event.return_value.elapsed_time.return_value = 0.5  # milliseconds
    monkeypatch.setattr(timing.torch, "cuda", cuda)
    for name, value in {"HAS_GPU": True, "STEPS": 1, "WARM": 1}.items():
        monkeypatch.setattr(timing, name, value)
    drafter = SimpleNamespace(propose=cuda.propose)
    with timing.watched(drafter, batch=2, k=3) as steps:
        for _ in range(3):
            drafter.propose(decode(2, 4))
    assert steps.device == [500.0] and len(steps.host) == 1
    order = [name for name, _, _ in cuda.mock_calls if name not in ("Event", "Event().elapsed_time")]
    behind = ["_sleep", "Event().record", "propose", "Event().record"]
    assert order == ["propose", *behind, "synchronize", "propose", "synchronize"]


def decode(batch: int, rows: int):
    """``propose``'s first argument on V2."""
    return SimpleNamespace(num_reqs=batch, num_scheduled_tokens=np.full(batch, rows))


def test_too_few_steps_are_an_error():
    """The rehearsals see both kinds of step on both runners."""
    drafter = SimpleNamespace(propose=lambda input_batch: None)
    few = timing.watched(drafter, batch=2, k=3)
    with pytest.raises(RuntimeError, match="with all 2 requests: 6 more are needed"), few:
        drafter.propose(decode(1, 4))  # not full
        drafter.propose(decode(2, 4))


def test_a_draft_step() -> None:
    """Two requests, three drafts each. Hidden 4, MLP 8, two query heads and one KV head of 2, 10 tokens."""
    attention = 4 * 4 + 2 * 4 * 2 + 4 * 4  # q, k and v, o; the first layer's q, k and v are twice as wide
    layers = (attention + 4 * 4 + 2 * 4 * 2) + 3 * attention + 4 * (3 * 4 * 8)
    hidden_states = 2 * 4 * 12 + 2 * 6 * 4  # K+1 rows of fc, 2K rows of the layers
    moved = HeadShape(4, 8, 2, 1, 2, 10).step_bytes(3, 2, parallel=True)
    assert moved == 2 * (12 * 4 + layers + 10 * 4 + hidden_states)


def test_kernels() -> None:
    """K = 1, two requests of two rows: 4 rows are read and staged; each request has 2 draft rows and a sample."""
    indices = 4 * 12 + 4 * 28 + 2 * 24
    moved = ((4 + 4) * 3 * 20 + indices, (4 + 1 + 4) * 20 + 4 * 4)
    assert moved_bytes(DraftBatch(2, 4, 1, 4, 2), row=20) == moved
