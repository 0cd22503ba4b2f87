"""What a GPU needs of training, shown without one."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from speculators.train import checkpointer

from peagle_tools.train import cpu, trainer
from peagle_tools.train.checkpoints import Checkpoints


def test_adamw_of_a_resumed_run_waits_for_no_step_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded to the GPU, each count would be read back in each step."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad, optimizer = torch.ones(2), torch.optim.AdamW([weight])
    optimizer.step()
    monkeypatch.setattr(checkpointer, "get_current_device", lambda: "cuda:0")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    cpu.setup()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.folder(-1).mkdir()
    torch.save(optimizer.state_dict(), checkpoints.optimizer_path(-1))
    checkpoints.load_optimizer_state_dict(Mock(dtype=torch.float32), optimizer)
    assert optimizer.state[weight]["step"].device.type == "cpu"


def test_replay_computes_in_the_dtype_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, a GPU's attention of grouped heads would hold all scores of a document."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(trainer, "measure", lambda *_: torch.is_autocast_enabled("cuda"))
    run = Mock(device_type="cuda", rank=1, config=SimpleNamespace(hidden_states_dtype=torch.bfloat16))
    assert trainer.Trainer._measure(run)


def test_attention_is_not_compiled_for_each_length() -> None:
    """As cuDNN's is, which torch prefers on Hopper."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    cpu.setup()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
