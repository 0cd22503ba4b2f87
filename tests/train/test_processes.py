"""Two processes over gloo train the head that one process trains on the batches of both."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.train.peagle_yaml import read_config
from tests.support.serving import free_port
from tests.train.runs import at_step, exit_code, in_child, new_trainer, stop, toy_run, train

STEPS = 4
# Two say nothing.
DOCUMENTS = [(30, 4), (28, 6), (31, 31), (29, 3), (27, 5), (32, 32), (30, 2), (26, 4), (30, 4), (30, 4)]
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"held_out": 2},
    "step": {"tokens": 32},
    "optimizer": {"steps": STEPS},
    "every": {"checkpoint": 2, "replay": 2},
    "speculators": {"scheduler_type": "none"},
    "selector": {"rank": 4},
}


def in_two(file: Path, work: Callable[[Path], object] = train) -> list[int]:
    """Exit codes of two processes that do ``work`` as torchrun starts them."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [in_child(work, file, env={**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    return [exit_code(process) for process in both]


def by_one(file: Path) -> dict[str, torch.Tensor]:
    """The head after the steps that two processes make, their gradients averaged in one."""
    trainer = new_trainer(file)
    loader, head = trainer.train_loader, trainer.model.train()
    (optimizer,) = trainer.optimizers
    samplers = [MultipackDistributedBatchSamplerV2(32, loader.dataset.approx_lengths, 2, rank) for rank in (0, 1)]
    assert [len(sampler) for sampler in samplers] == [STEPS, STEPS]
    supervised = []
    for step, batches in enumerate(zip(*samplers, strict=True)):
        optimizer.zero_grad()
        for rank, rows in enumerate(batches):
            batch = loader.collate_fn([loader.dataset[row] for row in rows])
            trainer.global_step = 2 * step + rank  # which decides what is sampled
            loss = head(**batch, **trainer.config.train_call_kwargs)[1]
            (loss / 2).backward()
            supervised.append(int(batch["loss_mask"].sum()))
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
    assert supervised.count(0) == 2
    return head.state_dict()


def test_two_processes_are_one(tmp_path: Path) -> None:
    """And going on from their second step they end with the same head."""
    file, wanted = toy_run(tmp_path / "run", DOCUMENTS, **SETTINGS), by_one(toy_run(tmp_path, DOCUMENTS, **SETTINGS))
    last = read_config(file).run / f"checkpoints/step-{STEPS}"
    assert in_two(file) == [0, 0]
    weights = load_file(last / "master.safetensors")
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-7)
    shutil.rmtree(last)
    assert in_two(file) == [0, 0]
    again = load_file(last / "master.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.items())
    with pytest.raises(ToolError, match="processes was 2 and is 1"):
        train(file)


def test_a_signal_to_one_stops_both(tmp_path: Path) -> None:
    def stopped(file: Path) -> None:
        at_step(pytest.MonkeyPatch(), 3, stop, rank=1)
        with pytest.raises(TryAgain, match="after step 3"):
            train(file)

    file = toy_run(tmp_path / "run", DOCUMENTS, **SETTINGS)
    assert in_two(file, stopped) == [0, 0]
    assert (read_config(file).run / "checkpoints/step-3").is_dir()
