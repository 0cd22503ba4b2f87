"""`train run` on a CPU: what it writes, and that no way to stop it changes the head that it ends with."""

import json
import os
import random
import resource
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hs_connectors.fp8_utils import SCALES_KEY, dequantize_fp8_tensor, quantize_tensor_to_fp8
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from peagle_tools.cli import app
from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.train import checkpoints as module
from peagle_tools.train.config import STAMP, read_config
from peagle_tools.train.run import make_trainer, to_options
from peagle_tools.train.trainer import Trainer
from tests.train.runs import MASK, finish, in_child, result, toy_run, train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run, and what it ended with."""
    file = toy_run(tmp_path_factory.mktemp("undisturbed"))
    finish(file)
    return file, result(file)


@pytest.fixture(autouse=True)
def nothing_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than training here; the run of ``undisturbed``, which is made before this, does draw."""
    monkeypatch.setattr("peagle_tools.train.trainer.write_plots", lambda run: None)


def checkpoints(file: Path) -> Path:
    return read_config(file).run / "checkpoints"


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, what: Any) -> None:
    """Call ``what`` when the optimizer is about to make ``step``."""
    original = Trainer._optimizers_step

    def wrapped(self: Trainer) -> None:
        if self.global_step == step - 1:
            what()
        original(self)

    monkeypatch.setattr(Trainer, "_optimizers_step", wrapped)


def test_what_a_run_writes(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    file, found = undisturbed
    folder = checkpoints(file)
    assert found["last"] == "step-12" and {found["best"].name} <= {"step-6", "step-12"}
    kept = {"step-6", "step-9", "step-12", found["best"].name}
    assert {path.name for path in folder.glob("step-*")} == kept
    trained = [line for line in found["log"] if "loss" in line]
    assert [line["step"] for line in trained] == [*range(1, 13)]
    assert [line["step"] for line in found["log"] if "held_out" in line] == [6, 12]
    assert trained[-1]["loss"] < trained[0]["loss"] and len(trained[0]["accuracy"]) == 3
    weights, master = (load_file(folder / "step-12" / name) for name in ("model.safetensors", "master.safetensors"))
    assert {tensor.dtype for tensor in master.values()} == {torch.float32}
    assert all(torch.equal(weights[name], tensor.bfloat16()) for name, tensor in master.items())
    plots = {file.name: file.read_text() for file in (file.parent / "run/plots").iterdir()}
    assert set(plots) == {"loss.svg", "accuracy.svg"}  # AL was not measured
    assert all(name in plots["accuracy.svg"] for name in (">depth 2<", ">held out, depth 0<"))
    shown = CliRunner().invoke(app, ["inspect", str(folder / "step-12"), "--target", str(file.parent / "target")])
    assert shown.exit_code == 0, shown.output


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """By AL where it is measured, also after a stop."""
    file, measured = toy_run(tmp_path / "run", every={"checkpoint": 2, "replay": 2}), []

    def measure(_: object, held_out: Any) -> Any:
        assert len(held_out) == 4
        return lambda _, step: measured.append(step) or {2: 2.5, 4: 2.75}.get(step, 2.0)

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(TryAgain):
            train(file, measure=measure)
    assert {path.name for path in checkpoints(file).glob("step-*")} == {"step-4", "step-6", "step-7"}
    train(file, measure=measure)
    assert measured == [2, 4, 6, 8, 10, 12]
    assert {path.name for path in checkpoints(file).glob("step-*")} == {"step-4", "step-8", "step-10", "step-12"}
    assert (checkpoints(file) / "best").readlink() == Path("step-4")


def test_killed_at_any_point_it_ends_with_the_same_head(tmp_path: Path) -> None:
    """Ten times, each time at a random moment of one of the next steps, or of the save after it."""
    files = [toy_run(tmp_path / name, optimizer={"steps": 60}) for name in ("undisturbed", "killed")]
    draw = random.Random(4)
    finish(files[0])

    def killed(file: Path, steps: int, seconds: float) -> None:
        original, count = Trainer._optimizers_step, [0]

        def watched(self: Trainer) -> None:
            count[0] += 1
            if count[0] == steps:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            original(self)

        Trainer._optimizers_step = watched  # type: ignore[method-assign]
        train(file)

    for _ in range(10):
        process = in_child(killed, files[1], draw.randint(1, 4), draw.uniform(0, 0.03), seconds=60)
        assert process.exitcode == -signal.SIGKILL
    finish(files[1])
    assert result(files[1]) == result(files[0])


@pytest.mark.parametrize(
    ("place", "step"),
    [("step-6.tmp/model.safetensors", 6), ("step-6.tmp", 6), ("checkpoints", 6), ("checkpoints", 12)],
)
def test_killed_while_it_saves(undisturbed: Any, tmp_path: Path, place: str, step: int) -> None:
    """Before a checkpoint is on the disk, before it has its name, and as soon as it has it, the last one too."""
    file = toy_run(tmp_path / "run")

    def killed() -> None:
        original = module.sync

        def watched(path: Path) -> None:
            if str(path).endswith(place) and (place != "checkpoints" or (path / f"step-{step}").exists()):
                os.kill(os.getpid(), signal.SIGKILL)
            original(path)

        module.sync = watched
        train(file)

    assert in_child(killed, seconds=60).exitcode == -signal.SIGKILL
    finish(file)
    assert result(file) == undisturbed[1]


def test_a_signal_saves_the_step_it_comes_in(undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toy_run(tmp_path / "run")
    at_step(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    stopped = CliRunner().invoke(app, ["train", "run", str(file)])
    assert stopped.exit_code == 75 and "stopped after step 5, which is saved" in stopped.output
    assert (checkpoints(file) / "step-5").is_dir()
    train(file)
    assert result(file) == undisturbed[1]


def test_a_full_disk_loses_one_interval(undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, (soft, hard) = toy_run(tmp_path / "run"), resource.getrlimit(resource.RLIMIT_FSIZE)
    at_step(monkeypatch, 5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard)))
    try:
        with pytest.raises(ToolError, match=r"step-6 cannot be written \(.*make room, .* goes on; step-3 is there$"):
            train(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.undo()
    assert sorted(path.name for path in checkpoints(file).glob("step-*")) == ["step-3"]
    train(file)
    assert result(file) == undisturbed[1]


def test_what_is_cut_off_does_not_open(
    undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = toy_run(tmp_path / "run")
    at_step(monkeypatch, 10, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(TryAgain):
        train(file)
    monkeypatch.undo()
    for path in (checkpoints(file) / "step-10/training_state.json", checkpoints(file) / "step-9/optimizer.pt"):
        os.truncate(path, 100)
    train(file)
    lines = [line for line in capsys.readouterr().out.splitlines() if "does not open" in line]
    kept = {path.name for path in checkpoints(file).glob("step-*")}
    assert kept == {"step-6", "step-9", "step-12", "step-9.broken", "step-10.broken"}
    assert len(lines) == 2 and "step-9 does not open (optimizer.pt has 100 of" in lines[1]
    assert result(file) == undisturbed[1]


def test_a_loss_that_is_no_number_names_its_documents(tmp_path: Path) -> None:
    file = toy_run(tmp_path / "run")
    states = read_config(file).data_folder / "hidden_states/hs_7.safetensors"
    tensors = load_file(states)
    tensors["hidden_states"][5] = torch.nan
    save_file(tensors, states)
    with pytest.raises(ToolError, match=r"^step \d+: the loss is nan, .*rows (\d+, )*7(, \d+)* of the data; "):
        train(file)
    left = [load_file(path / "master.safetensors") for path in checkpoints(file).glob("step-*")]
    assert all(tensor.isfinite().all() for tensors in left for tensor in tensors.values())


def test_a_server_that_is_gone_stops_the_run(tmp_path: Path) -> None:
    few = {"max_retries": 0, "generation_validation_retries": 0, "max_consecutive_generation_failures": 2}
    data = {"online": True, "endpoint": "http://127.0.0.1:9/v1"}
    file = toy_run(tmp_path / "run", data=data, speculators=few)
    shutil.rmtree(read_config(file).data_folder / "hidden_states")
    stopped = CliRunner().invoke(app, ["train", "run", str(file)])
    assert stopped.exit_code == 75, stopped.output
    assert "circuit breaker tripped" in stopped.output and "goes on from the beginning" in stopped.output


def test_hidden_states_of_another_document_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, and where they become so while it trains."""
    config = read_config(file := toy_run(tmp_path / "run"))
    folder = config.data_folder / "hidden_states"
    trainer = make_trainer(config, to_options(config))
    shutil.copy(folder / "hs_3.safetensors", folder / "hs_5.safetensors")
    with pytest.raises(ToolError, match=r"^row 5 of the data: ") as refused:
        trainer.run()
    with pytest.raises(ToolError, match=r"those of 1 of 24 documents .*, rows 5; "):
        train(file)

    def in_worker(*_: object) -> None:  # what torch makes of it there
        raise ToolError(f"Caught ToolError in DataLoader worker process 0.\n  ...\n{refused.typename}: {refused.value}")

    monkeypatch.setattr("peagle_tools.train.run.train", in_worker)
    shown = CliRunner().invoke(app, ["train", "run", str(file)])
    assert shown.exit_code == 2 and shown.stderr == f"peagle-vllm: {refused.value}\n"


def test_hidden_states_in_fp8_are_read(tmp_path: Path) -> None:
    """As speculators' connector writes them, and as what they stand for in bfloat16 trains."""
    found = {}
    for backend in ("fp8", "file"):
        changes: dict[str, Any] = {"data": {"backend": backend}, "optimizer": {"steps": 4}}
        file = toy_run(tmp_path / backend, **changes, step={"dtype": "bfloat16"}, engine={"dtype": "bfloat16"})
        for states in (read_config(file).data_folder / "hidden_states").iterdir():
            tensors = load_file(states)
            fp8, scales = quantize_tensor_to_fp8(tensors["hidden_states"])
            if backend == "fp8":
                save_file({**tensors, "hidden_states": fp8, SCALES_KEY: scales}, states)
            else:
                save_file({**tensors, "hidden_states": dequantize_fp8_tensor(fp8, scales)}, states)
        train(file)
        found[backend] = result(file)
    assert found["fp8"] == found["file"]


def test_hidden_states_of_another_dtype_than_the_steps_train(tmp_path: Path) -> None:
    """A target served in bfloat16, whatever the step computes in: as the same numbers in float32 do."""
    found = {}
    for dtype in ("bfloat16", "float32"):
        file = toy_run(tmp_path / dtype, optimizer={"steps": 4}, engine={"dtype": dtype})
        for states in (tmp_path / "bfloat16/run/data/hidden_states").iterdir():
            tensors = load_file(states)
            tensors["hidden_states"] = tensors["hidden_states"].to(getattr(torch, dtype))
            save_file(tensors, tmp_path / dtype / "run/data/hidden_states" / states.name)
        train(file)
        found[dtype] = result(file)
    assert found["bfloat16"] == found["float32"]
    file = toy_run(tmp_path / "bfloat16-step", optimizer={"steps": 4}, step={"dtype": "bfloat16"})
    train(file)
    assert result(file)["log"][-1]["held_out"]["loss"] > 0


def test_long_documents_are_cut_on_request(tmp_path: Path) -> None:
    """Every supervised token but the first two of a later piece is in a batch."""
    documents = [(150, 10), *[(30, 5)] * 6]
    file = toy_run(tmp_path / "run", documents, data={"held_out": 2, "long": "split"}, optimizer={"steps": 4})
    config = read_config(file)
    trainer = make_trainer(config, to_options(config))
    counted = sum(int(batch["loss_mask"].sum()) for batch in trainer.train_loader)
    assert counted == (150 - 10) + 4 * (30 - 5) - 2 * 2
    train(file)


def change_stamp(file: Path) -> None:
    stamp = read_config(file).data_folder / STAMP
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "aux_layers": [1, 4, 6], "dtype": "bfloat16"}))


def lose_states(file: Path) -> None:
    folder = read_config(file).data_folder / "hidden_states"
    (folder / "hs_3.safetensors").unlink()
    os.truncate(folder / "hs_9.safetensors", 200)


def other_layers(file: Path) -> None:
    states = read_config(file).data_folder / "hidden_states/hs_0.safetensors"
    tensors = load_file(states)
    save_file({**tensors, "hidden_states": tensors["hidden_states"][:, :3].contiguous()}, states)


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "K beyond the depths": ({"every": {"k": [3, 5]}}, None, r"every.k: K = 5 is more than head.depths \(3\)"),
    "long documents": ({"step": {"tokens": 30}}, None, r"\d+ of 24 documents have more than step.tokens \(30\) tokens"),
    "a mask token in use": (
        {"head": {"mask_token": 5}},
        None,
        f"head.mask_token: the target's tokenizer uses 5 for 'w5'; .* {MASK} say",
    ),
    "hidden states of other layers": (
        {},
        change_stamp,
        r"aux_layers \[1, 4, 6\] where peagle.yaml says \[2, 4, 5\], dtype bfloat16 where",
    ),
    "lost hidden states": (
        {},
        lose_states,
        "those of 2 of 24 documents are missing, cut off, or of other ones or layers, rows 3, 9; ",
    ),
    "hidden states of another shape": (
        {},
        other_layers,
        "those of 1 of 24 documents are missing, cut off, or of other ones or layers, rows 0; ",
    ),
    "all held out": ({"data": {"held_out": 24}}, None, "has 24 documents, and data.held_out keeps 24 of them"),
    "an option of speculators": (
        {"speculators": {"draft_arc": "llama"}},
        None,
        "draft_arc: .*; did you mean draft_arch",
    ),
    "its value": ({"speculators": {"draft_arch": "gpt"}}, None, "speculators.draft_arch: Input should be 'llama' or"),
    "layers split one by one": (
        {"speculators": {"fsdp_shard": True}},
        None,
        "fsdp_shard: splits layer by layer, .*; set optimizer.shard",
    ),
    "one process to split over": ({"optimizer": {"shard": True}}, None, "optimizer.shard: there is one process only"),
    "a vocabulary without counts": ({"head": {"draft_vocab": 16}}, None, "head.draft_vocab: .*token_freq.pt is not"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_one_line(tmp_path: Path, what: str) -> None:
    changes, damage, line = REFUSED[what]
    file = toy_run(tmp_path / "run", **changes) if "every" not in changes else toy_run(tmp_path / "run")
    if "every" in changes:
        file.write_text(file.read_text().replace("every:\n", "every:\n  k: [3, 5]\n"))
    if damage:
        damage(file)
    done = CliRunner().invoke(app, ["train", "run", str(file)])
    assert done.exit_code == 2, done.output
    assert done.stderr.count("peagle-vllm: ") == 1 and "Traceback" not in done.output
    with pytest.raises(ToolError, match=line):
        train(file)


def test_documents_that_begin_supervised_are_refused(tmp_path: Path) -> None:
    file = toy_run(tmp_path / "run", [(20, 4)] * 5 + [(20, 1), (20, 0)])
    with pytest.raises(ToolError, match="2 of 7 documents are supervised in their first 2 tokens, rows 5, 6: "):
        train(file)


def test_another_config_does_not_go_on(undisturbed: Any) -> None:
    file = undisturbed[0]
    text = file.read_text()
    file.write_text(text.replace("lr: 0.01", "lr: 0.02"))
    try:
        with pytest.raises(ToolError, match=r"step-12 is of another run: optimizer.lr was 0.01 and is 0.02; "):
            train(file)
    finally:
        file.write_text(text)
    train(file)  # there is nothing left to do
    assert result(file) == undisturbed[1]
