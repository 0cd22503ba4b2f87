"""`train run` on a CPU: what it writes, and that no way to stop it changes the head that it ends with.

Two processes over gloo train the head that one process trains on the batches of both.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.train import checkpointer
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.train import checkpoints as module
from peagle_tools.train import cpu, draft_model, selector_training, training
from peagle_tools.train import trainer as trainer_module
from peagle_tools.train.peagle_yaml import STAMP, read_config
from tests.support.command import run
from tests.support.serving import free_port
from tests.train.runs import at_step, exit_code, in_child, new_trainer, result, stop, toy_run, train


def selector_run(folder: Path) -> Path:
    return toy_run(folder / "run", selector={"rank": 4})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run of a head with a selector, and what it ended with."""
    file = selector_run(tmp_path_factory.mktemp("undisturbed"))
    train(file)
    return file, result(file)


def checkpoints(file: Path) -> Path:
    return read_config(file).run / "checkpoints"


def saved_steps(file: Path) -> set[str]:
    return {path.name for path in checkpoints(file).glob("step-*")}


def test_what_a_run_writes(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    file, ended = undisturbed
    folder = checkpoints(file) / "step-12"
    assert ended["last"] == "step-12" and ended["best"].name in ("step-6", "step-12")
    assert saved_steps(file) == {"step-6", "step-9", "step-12"}
    trained = [line for line in ended["log"] if "loss" in line]
    assert [line["step"] for line in trained] == [*range(1, 13)]
    assert [line["step"] for line in ended["log"] if "held_out" in line] == [6, 12]
    assert trained[-1]["loss"] < trained[0]["loss"] and trained[-1]["selector_loss"] > 0
    assert len(trained[0]["accuracy"]) == 3
    phases = json.loads((folder.parents[1] / "log.jsonl").read_text().partition("\n")[0])["ms"]
    assert phases.keys() == {"queue", "h2d", "fwd", "bwd", "opt"} and phases["fwd"] > 0
    assert not (folder / "config.py").exists() and "auto_map" not in (folder / "config.json").read_text()
    weights, master = load_file(folder / "model.safetensors"), load_file(folder / "master.safetensors")
    selector = load_file(folder / "edge/model.safetensors")
    assert {tensor.dtype for tensor in master.values()} == {torch.float32}
    assert {name for name in selector if "scale" not in name} == set(master) - set(weights)
    assert all(torch.equal((weights | selector)[name], tensor.bfloat16()) for name, tensor in master.items())
    assert selector["candidate_selector.predecessor_codebook"].any()
    shown = run("inspect", folder, "--target", file.parent / "target")
    assert shown.exit_code == 0 and "selector" in shown.output, shown.output
    al = [json.loads(line) for line in ended["al"].splitlines()]
    assert [(line["step"], line["how"], line["K"]) for line in al] == [*product((6, 12), ["replay"], (1, 2, 3))]
    assert all(line["al"] == pytest.approx(1 + sum(line["acceptance"]), abs=2e-4) for line in al)


def test_other_settings_are_another_run(undisturbed: Any) -> None:
    other = undisturbed[0].with_name("other.yaml")
    other.write_text(undisturbed[0].read_text().replace("rank: 4", "rank: 8"))
    with pytest.raises(ToolError, match=r"is of another run: selector was \{'rank': 4\} and is \{'rank': 8\}; put"):
        train(other)
    other.write_text(undisturbed[0].read_text().replace("chunk_rows: 16", "chunk_rows: 5"))
    new_trainer(other)  # memory alone
    note = checkpoints(undisturbed[0]) / "step-12/training_state.json"
    text, state = note.read_text(), json.loads(note.read_text())
    state["run"]["step"]["chunk_rows"] = 16  # as a run noted it that began when this counted
    note.write_text(json.dumps(state))
    new_trainer(other)
    note.write_text(text)
    lengths = patch.object(trainer_module, "sha256", lambda _: sha256(b"of other documents"))
    with lengths, pytest.raises(ToolError, match="of another run: lengths of documents was"):
        train(other)


def test_a_head_that_another_begins_as_hands_on_its_selector(undisturbed: Any, tmp_path: Path) -> None:
    folder = checkpoints(undisturbed[0]) / "step-12"
    file = toy_run(tmp_path, selector={"rank": 4}, head={"init": str(folder)})
    selector = new_trainer(file).head.candidate_selector.state_dict()
    first = load_file(folder / "edge/model.safetensors")
    assert all(torch.equal(tensor.bfloat16(), first[f"candidate_selector.{name}"]) for name, tensor in selector.items())


def test_a_run_leaves_its_memory_to_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That starts an engine on the same GPU."""
    heads: list[weakref.ref] = []
    original = training.make_trainer

    def noted(*args: Any) -> Any:
        trainer = original(*args)
        heads.append(weakref.ref(trainer.head))
        return trainer

    monkeypatch.setattr(training, "make_trainer", noted)
    assert training.run(read_config(toy_run(tmp_path, optimizer={"steps": 1}))).startswith("trained for 1 steps")
    assert heads[0]() is None


def test_embeddings_are_trained_unless_told_otherwise(undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """speculators' P-EAGLE takes no notice of its own option."""
    file = toy_run(tmp_path / "run", optimizer={"steps": 3}, speculators={"embed_requires_grad": False})
    train(file)
    for yaml, is_trained in ((undisturbed[0], True), (file, False)):
        folder, target = checkpoints(yaml) / "best", load_file(yaml.parent / "target/model.safetensors")
        embeddings = load_file(folder / "master.safetensors")["embed_tokens.weight"]
        assert torch.equal(embeddings, target["model.embed_tokens.weight"]) != is_trained
        assert json.loads((folder / "config.json").read_text())["embed_requires_grad"] == is_trained


def test_the_best_is_kept_with_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By AL, also after a stop."""
    file, measured = toy_run(tmp_path / "run", every={"checkpoint": 2, "replay": 2}), []

    def measure(_: object, __: object, held_out: Any, step: int) -> tuple[float, list[list[int]]]:
        assert len(held_out) == 4
        measured.append(step)
        return {2: 2.5, 4: 2.75}.get(step, 2.0), []

    monkeypatch.setattr(trainer_module, "measure", measure)
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 7, stop)
        with pytest.raises(TryAgain):
            train(file)
    assert saved_steps(file) == {"step-4", "step-6", "step-7"}
    train(file)
    assert measured == [2, 4, 6, 8, 10, 12]
    assert saved_steps(file) == {"step-4", "step-8", "step-10", "step-12"}
    assert (checkpoints(file) / "best").readlink() == Path("step-4")


@pytest.mark.parametrize(
    ("place", "step"),
    [("", 8), ("removed", 12), ("6.tmp/model.safetensors", 6), ("-6.tmp", 6), ("checkpoints", 6), ("checkpoints", 12)],
)
def test_killed_at_any_point_it_ends_with_the_same_head(
    undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, step: int
) -> None:
    """In a step; while an old checkpoint goes; before one is on the disk, has its name, or as soon as it has it."""
    file, original, unlink = selector_run(tmp_path), module.sync, os.unlink

    def removing(path: str, **options: Any) -> None:
        unlink(path, **options)
        if path == "training_state.json":
            signal.raise_signal(signal.SIGKILL)

    def watched(path: Path) -> None:
        if str(path).endswith(place) and (place != "checkpoints" or (path / f"step-{step}").exists()):
            signal.raise_signal(signal.SIGKILL)
        original(path)

    with monkeypatch.context() as patch:
        if place == "removed":
            patch.setattr(os, "unlink", removing)
        elif place:
            patch.setattr(module, "sync", watched)
        else:
            at_step(patch, step, lambda: signal.raise_signal(signal.SIGKILL))
        assert exit_code(in_child(train, file)) == -signal.SIGKILL
    train(file)
    assert result(file) == undisturbed[1]


def test_a_full_disk_loses_one_interval(undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, limits = selector_run(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    at_step(monkeypatch, 5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1])))
    try:
        with pytest.raises(ToolError, match=r"step-6 cannot be written \(.*make room, .* continues; step-3 is there$"):
            train(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert saved_steps(file) == {"step-3"}
    train(file)
    assert result(file) == undisturbed[1]


def test_a_signal_to_every_process_saves_the_step(tmp_path: Path) -> None:
    """Ctrl+C in a terminal, or a scheduler's SIGTERM: processes that load documents stay."""
    many = {"optimizer": {"steps": 10_000}, "every": {"checkpoint": 10_000, "replay": 10_000}}
    file = toy_run(tmp_path / "run", speculators={"num_workers": 2}, **many)
    words, log = [sys.executable, "-mpeagle_tools.cli", "train", "run", str(file)], read_config(file).run / "log.jsonl"
    process = subprocess.Popen(words, start_new_session=True)
    for number, lines in ((signal.SIGINT, 9), (signal.SIGTERM, 18)):
        while not log.exists() or len(log.read_text().splitlines()) < lines:
            assert process.poll() is None
            time.sleep(0.1)
        for each in psutil.Process(process.pid).children(recursive=True):
            each.send_signal(number)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75 and len(saved_steps(file)) == 1


def test_a_loss_that_is_no_number_names_its_documents(tmp_path: Path) -> None:
    file = toy_run(tmp_path / "run")
    states = read_config(file).data_folder / "hidden_states/hs_7.safetensors"
    tensors = load_file(states)
    tensors["hidden_states"][5] = torch.nan
    save_file(tensors, states)
    with pytest.raises(ToolError, match=r"^step \d+: the loss .* no number, with rows (\d+, )*7(, \d+)* of the data; "):
        train(file)


def test_hidden_states_that_change_while_it_trains_are_refused(tmp_path: Path) -> None:
    cpu.setup()
    file = toy_run(tmp_path / "run")
    folder, trainer = read_config(file).data_folder / "hidden_states", new_trainer(file)
    shutil.copy(folder / "hs_3.safetensors", folder / "hs_5.safetensors")
    with pytest.raises(ToolError, match=r"^row 5 of the data: "):
        trainer.run()


def test_hidden_states_of_another_dtype_than_the_steps_train(tmp_path: Path) -> None:
    """A target served in bfloat16, whatever the step computes in: as the same numbers in float32 do."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        file = toy_run(tmp_path / name, optimizer={"steps": 4}, engine={"dtype": name})
        for states in (read_config(file).data_folder / "hidden_states").iterdir():
            tensors = load_file(states)
            save_file({**tensors, "hidden_states": tensors["hidden_states"].bfloat16().to(dtype)}, states)
        train(file)
        results.append(result(file))
    assert results[0] == results[1]
    file = toy_run(tmp_path / "bfloat16-step", optimizer={"steps": 4}, step={"dtype": "bfloat16"})
    train(file)
    assert result(file)["log"][-1]["held_out"]["loss"] > 0


def test_the_first_two_tokens_of_a_document_are_not_supervised(tmp_path: Path) -> None:
    """No state of the head is before them."""
    loader = new_trainer(toy_run(tmp_path / "run", [(30, 0)] * 6, data={"held_out": 2})).train_loader
    assert sum(int(batch["loss_mask"].sum()) for batch in loader) == 4 * (30 - 2)


def change_stamp(data: Path) -> None:
    stamp = data / STAMP
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "aux_layers": [1, 4, 6], "dtype": "bfloat16"}))


def lose_states(data: Path) -> None:
    """One of other layers, one that is not there, one that is cut off, and one of another document."""
    files = [data / f"hidden_states/hs_{row}.safetensors" for row in range(10)]
    tensors = load_file(files[0])
    shutil.copy(files[0], files[5])
    save_file({**tensors, "hidden_states": tensors["hidden_states"][:, :3].contiguous()}, files[0])
    files[3].unlink()
    os.truncate(files[9], 200)


def quantize_lm_head(data: Path) -> None:
    file = data.parents[1] / "target/model.safetensors"
    save_file(load_file(file) | {"lm_head.weight_scale": torch.ones(1)}, file)


STAMPED = r"'aux_layers': \[1, 4, 6\], 'dtype': 'bfloat16'\}, where peagle.yaml has .*\[2, 4, 5\].*; put peagle.yaml"
REFUSED = {
    "a mask token in use": ({"speculators": {"mask_token_id": 5}}, "mask_token_id: the target's .* uses 5 for 'w5'"),
    "no token": ({"speculators": {"mask_token_id": -3}}, "mask_token_id: -3 is none of the target's .* tokens; leave"),
    "states of other layers": (change_stamp, STAMPED),
    "lost": (lose_states, "rows 0, 3, 5, 9 of the data have no file there, or .*; `peagle-vllm train states` makes"),
    "all held out": ({"data": {"held_out": 24}}, "has 24 documents, and data.held_out keeps 24 of them"),
    "a document longer than a step": ({"step": {"tokens": 32}}, "documents have more than step.tokens"),
    "unknown option": ({"speculators": {"draft_arc": "llama"}}, "draft_arc: is no option of speculators"),
    "its value": ({"speculators": {"draft_arch": "gpt"}}, "speculators.draft_arch: Input should be 'llama' or"),
    "a window": ({"speculators": {"sliding_window": 64}}, "sliding_window: cannot be set here; remove it"),
    "its activation": ({"speculators": {"draft_hidden_act": "gelu"}}, "draft_hidden_act: cannot be set here"),
    "a ratio above 1": ({"speculators": {"scheduler_warmup_ratio": 2.0}}, "scheduler_warmup_ratio: is 2.0, and has"),
    "more drafts than tokens": ({"head": {"draft_vocab": 1000}}, "head.draft_vocab: 1000 are more than the target's"),
    "a quantized output matrix": (quantize_lm_head, r"its lm_head is quantized \(lm_head.weight_scale\), which"),
    "its logger": ({"speculators": {"logger": " tensorboard"}}, "logger: tensorboard is not installed; pip install"),
    "no logger": ({"speculators": {"logger": "json"}}, "speculators.logger: 'json' is none of tensorboard, wandb, tra"),
}


@pytest.mark.parametrize(("mistake", "line"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(tmp_path: Path, mistake: Any, line: str) -> None:
    """Changes of peagle.yaml, or what happened to the data."""
    file = toy_run(tmp_path / "run", **(mistake if isinstance(mistake, dict) else {}))
    if callable(mistake):
        mistake(read_config(file).data_folder)
    done = run("train", "run", file)
    assert done.exit_code == 2 and "Traceback" not in done.output, done.output
    assert done.stderr.count("peagle-vllm: ") == 1 and re.search(line, done.stderr), done.stderr


STEPS = 4
OF_ALL = "mean_over_processes"
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
    """The head after the steps that two processes make, their losses added in one: each row counts alike."""
    trainer = new_trainer(file)
    loader, head = trainer.train_loader, trainer.model.train()
    (optimizer,) = trainer.optimizers
    samplers = [MultipackDistributedBatchSamplerV2(32, loader.dataset.approx_lengths, 2, rank) for rank in (0, 1)]
    assert [len(sampler) for sampler in samplers] == [STEPS, STEPS]
    supervised = []
    for step, batches in enumerate(zip(*samplers, strict=True)):
        both = [loader.collate_fn([loader.dataset[row] for row in rows]) for rows in batches]
        counts: list[torch.Tensor] = []  # rows of the head's loss and of the selector's, in each process

        def losses(count: Callable[..., Any], step: int = step, both: list[Any] = both) -> Iterator[torch.Tensor]:
            for rank, batch in enumerate(both):
                trainer.global_step = 2 * step + rank  # which decides what is sampled
                with patch.object(draft_model, OF_ALL, count), patch.object(selector_training, OF_ALL, count):
                    yield head(**batch, **trainer.config.train_call_kwargs)[1]

        list(losses(lambda count, _, of=counts: of.append(count) or count))
        means = iter(2 * [(one + other) / 2 for one, other in zip(counts[:2], counts[2:], strict=True)])
        optimizer.zero_grad()
        (sum(losses(lambda *_, of=means: next(of))) / 2).backward()
        supervised += [int(batch["loss_mask"].sum()) for batch in both]
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
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-6)
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


def test_adamw_of_a_resumed_run_waits_for_no_step_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded to the GPU, each count would be read back in each step."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad, optimizer = torch.ones(2), torch.optim.AdamW([weight])
    optimizer.step()
    monkeypatch.setattr(checkpointer, "get_current_device", lambda: "cuda:0")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    cpu.setup()
    checkpoints = module.Checkpoints(tmp_path)
    checkpoints.folder(-1).mkdir()
    torch.save(optimizer.state_dict(), checkpoints.optimizer_path(-1))
    checkpoints.load_optimizer_state_dict(Mock(dtype=torch.float32), optimizer)
    assert optimizer.state[weight]["step"].device.type == "cpu"


def test_replay_computes_in_the_dtype_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, a GPU's attention of grouped heads would hold all scores of a document."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    monkeypatch.setattr(trainer_module, "measure", lambda *_: [of("cuda") for of in dtype])
    run = Mock(device_type="cuda", rank=1, config=SimpleNamespace(hidden_states_dtype=torch.bfloat16))
    assert trainer_module.Trainer._measure(run) == [True, torch.bfloat16]


def test_attention_is_not_compiled_for_each_length() -> None:
    """As cuDNN's is, which torch prefers on Hopper."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    cpu.setup()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
