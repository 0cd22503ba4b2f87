"""Two processes over gloo train the head that one process trains on the batches of both."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.train.config import read_config
from peagle_tools.train.run import make_trainer, to_options
from peagle_tools.train.trainer import Trainer
from tests.train.runs import in_child, toy_run, train

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


def trained(file: Path) -> dict[str, torch.Tensor]:
    return load_file(read_config(file).run / f"checkpoints/step-{STEPS}/master.safetensors")


def in_two(file: Path, work: Callable[[Path], object] = train) -> list[int]:
    """Exit codes of two processes that do ``work`` as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    both = [in_child(work, file, env={**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    for process in both:
        process.join(60)
        process.kill()  # one that waits for the other
        process.join()
    return [process.exitcode for process in both]


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The head after the steps that two processes make, their gradients averaged in one."""
    config = read_config(toy_run(tmp_path_factory.mktemp("one"), DOCUMENTS, **SETTINGS))
    trainer = make_trainer(config, to_options(config))
    loader, head, (optimizer,) = trainer.train_loader, trainer.model.train(), trainer.optimizers
    samplers = [MultipackDistributedBatchSamplerV2(32, loader.dataset.approx_lengths, 2, rank) for rank in (0, 1)]
    assert [len(sampler) for sampler in samplers] == [STEPS, STEPS]
    supervised = []
    for step, batches in enumerate(zip(*samplers, strict=True)):
        optimizer.zero_grad()
        for rank, rows in enumerate(batches):
            batch = loader.collate_fn([loader.dataset[row] for row in rows])
            trainer.global_step = 2 * step + rank  # which decides what is sampled
            _, loss, _ = head(**batch, **trainer.config.train_call_kwargs)
            (loss / 2).backward()
            supervised.append(int(batch["loss_mask"].sum()))
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
    assert supervised.count(0) == 2
    return head.state_dict()


@pytest.mark.parametrize("shard", [False, True], ids=("whole", "split"))
def test_two_processes_are_one(by_one: dict[str, torch.Tensor], tmp_path: Path, shard: bool) -> None:
    settings = {**SETTINGS, "optimizer": {**SETTINGS["optimizer"], "shard": shard}}
    file = toy_run(tmp_path / "run", DOCUMENTS, **settings)
    assert in_two(file) == [0, 0]
    found = trained(file)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, by_one[name], rtol=1e-5, atol=1e-7)
    # Going on from step 2 ends with the same head.
    last = read_config(file).run / f"checkpoints/step-{STEPS}"
    (last / "training_state.json").unlink()
    assert in_two(file) == [0, 0]
    assert all(torch.equal(tensor, found[name]) for name, tensor in trained(file).items())
    with pytest.raises(ToolError, match=r"processes was 2 and is 1|one process only"):
        train(file)


def test_a_signal_to_one_stops_both(tmp_path: Path) -> None:
    def stopped(file: Path) -> None:
        original = Trainer._optimizers_step

        def watched(self: Trainer) -> None:
            if self.rank and self.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            original(self)

        Trainer._optimizers_step = watched  # type: ignore[method-assign]
        with pytest.raises(TryAgain, match="after step 3"):
            train(file)

    file = toy_run(tmp_path / "run", DOCUMENTS, **SETTINGS)
    assert in_two(file, stopped) == [0, 0]
    assert (read_config(file).run / "checkpoints/step-3").is_dir()
