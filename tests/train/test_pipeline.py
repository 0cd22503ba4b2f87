"""The order of the steps, what is skipped and refused, with stand-ins that write a file; the real steps, killed."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.train import pipeline as module
from peagle_tools.train.peagle_yaml import Config, read_config
from peagle_tools.train.pipeline import SPECULATORS, STEPS, pipeline
from peagle_vllm.heads.files import HeadError
from tests.support.command import only_line, run
from tests.support.models import MODELS, TARGET, heldout
from tests.support.serving import environment
from tests.train.runs import ENGINE

NAMES = list(STEPS)
WRITTEN = [name for _, writes in STEPS.values() for name in writes]


def end(file: Path, begin: str | None = None, stopped: str = "") -> list[str]:
    """The steps that the pipeline does, begun at a step; each writes its first file, and one is stopped then."""
    ran = []

    def do(step: str, config: Config) -> None:
        ran.append(step)
        for path in (config.run / name for name in STEPS[step][1][:1]):
            path.write_text(step) if path.suffix else path.mkdir(parents=True, exist_ok=True)
        if step == stopped:
            raise TryAgain(step)

    with patch.object(module, "do", do), pytest.raises(TryAgain) if stopped else nullcontext():
        pipeline(file, read_config(file), begin)
    return ran


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "source.jsonl").write_text('{"prompt": "x"}\n')
    return written(tmp_path, 8)


def written(folder: Path, max_tokens: int, more: str = "") -> Path:
    file = folder / "peagle.yaml"
    file.write_text(f"target: {TARGET}\ndata: {{prompts: [source.jsonl], max_tokens: {max_tokens}}}\n{more}")
    return file


def test_finished_steps_are_skipped(file: Path) -> None:
    at = NAMES.index("states")
    assert end(file, stopped="states") == NAMES[: at + 1]
    assert end(file) == NAMES[at:]
    assert end(file) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("folder: 2024-13-45", " no YAML: "),
        ('folder: "\x01"', " no YAML: "),
        (f"folder: {3000 * '['}", " no YAML: "),
        ("step: {cod: [0.5]}", "2: step.cod.1: is missing"),
        ("engine: {dtype: [bfloat16]}", r"2: engine: dtype is \['bfloat16'\]"),
        ("engine: {dtype: auto}", "2: engine: dtype is 'auto', which does not say how hidden states"),
        ("data: {endpoint: 'http://localhost:99999/v1'}", "2: data.endpoint: .*invalid port number"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "peagle.yaml").write_text(f"target: {TARGET}\n{line}\n")
    with pytest.raises(ToolError, match=f"peagle.yaml:{says}"):
        read_config(tmp_path / "peagle.yaml")


def test_another_speculators_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that is checked is the one that this package requires."""
    for requirements in ("pyproject.toml", "requirements/train.txt"):
        assert f"speculators=={SPECULATORS}" in (MODELS.parent / requirements).read_text()
    monkeypatch.setattr(module, "version", lambda _: "0.10.0")
    line = only_line(run("train", "data", file))
    assert line.startswith("peagle-vllm: speculators 0.10.0 is installed, and training")
    assert line.endswith(f"pip install --no-deps speculators=={SPECULATORS} hs-connectors=={SPECULATORS}")


def test_other_settings_are_refused_until_the_step_is_done_again(file: Path) -> None:
    """Also where the step was only begun: half of its answers would be of other settings."""
    assert end(file, stopped="answers") == NAMES[:2]
    written(file.parent, 16)
    with pytest.raises(ToolError, match=r"answers was begun with other settings .* `--from answers`"):
        end(file)
    assert end(file, "answers", stopped="answers") == ["answers"]
    (read_config(file).run / "answers.jsonl").unlink()  # where nothing is written, other settings may be tried
    assert end(written(file.parent, 32)) == NAMES[1:]
    (file.parent / "source.jsonl").write_text('{"prompt": "y"}\n')
    for begin in (None, "run"):
        with pytest.raises(ToolError, match="prompts was begun with other settings or data"):
            end(file, begin)
    with pytest.raises(ToolError, match="is no option of speculators"):
        end(written(file.parent, 32, "speculators: {schedular_type: linear}\n"), "answers")
    assert {"answers.jsonl", "checkpoints"} <= {path.name for path in read_config(file).run.iterdir()}


def test_what_costs_memory_or_time_alone_may_change(file: Path) -> None:
    end(file, stopped="run")
    lighter = "engine: {gpu_memory_utilization: 0.5}\nstep: {chunk_rows: 8}\nspeculators: {num_workers: 0}\n"
    assert end(written(file.parent, 8, lighter)) == ["run", "check"]


def test_the_steps_dtype_leaves_answers_and_hidden_states_as_they_are(file: Path) -> None:
    """The server's own dtype is another: with that, answers are others."""
    end(file, stopped="run")
    shutil.rmtree(read_config(file).run / "checkpoints")  # nothing is trained yet
    assert end(written(file.parent, 8, "step: {dtype: float32}\nengine: {dtype: bfloat16}\n")) == ["run", "check"]
    written(file.parent, 8, "step: {dtype: float32}\nengine: {dtype: float32}\n")
    with pytest.raises(ToolError, match="answers was begun with other settings"):
        end(file)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("speculators: {no_such_option: 1}", "speculators.no_such_option: is no option"),
        ("head: {aux_layers: [2, 99]}", r"aux_layers: is \[2, 99\]; name some of 0 to 7"),
        ("head: {aux_layers: [5, 2]}", r"is \[5, 2\]; name some of 0 to 7, ascending"),
        ("head: {init: ./typo}", "^/.*/typo is not a folder"),
        ("selector: true", ":[0-9]+: selector: is no mapping of keys to values"),
    ],
)
def test_what_training_would_refuse_is_refused_before_the_first_step(file: Path, settings: str, says: str) -> None:
    with pytest.raises((HeadError, ToolError), match=says):
        end(written(file.parent, 8, settings))
    assert end(written(file.parent, 8)) == NAMES  # nothing was begun


@pytest.mark.parametrize(("key", "name"), [("prompts", "log.jsonl"), ("apart_from", "data/x.jsonl")])
def test_prompts_that_a_step_would_write_over_are_refused(tmp_path: Path, key: str, name: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / name).write_text('{"prompt": "x"}\n')
    (tmp_path / "peagle.yaml").write_text(f"target: {TARGET}\nfolder: .\ndata: {{{key}: [{name}]}}\n")
    with pytest.raises(ToolError, match=f"folder: its {name.split('/')[0]} is written and removed by steps; name"):
        read_config(tmp_path / "peagle.yaml")


def test_a_folder_elsewhere_is_unlinked(file: Path) -> None:
    assert end(file) == NAMES
    data, elsewhere = read_config(file).data_folder, file.parent / "elsewhere"
    data.rename(elsewhere)
    data.symlink_to(elsewhere)
    assert end(file, "data") == NAMES[2:]
    assert elsewhere.is_dir() and not data.is_symlink()


def test_a_target_is_enough(tmp_path: Path) -> None:
    """Prompts of the target's own need no data set; with other ones, or measured prompts, the step is another one."""
    file = tmp_path / "peagle.yaml"
    (tmp_path / "measured.jsonl").write_text('{"prompt": "x"}\n')

    def write(**data: Any) -> Path:
        file.write_text(json.dumps({"target": str(TARGET), "data": data}))
        return file

    data = {"from_target": 9, "apart_from": ["measured.jsonl"]}
    assert end(write(**data)) == NAMES
    for change in ({"from_target": 10}, {"sampling": {"top_p": 1}}, {"apart_from": []}):
        with pytest.raises(ToolError, match="prompts was begun with other settings"):
            end(write(**data | change))
    assert "data.prompts: is empty; name files, or data sets of the hub" in only_line(run("train", "prompts", write()))


def test_doing_a_step_again_removes_what_it_and_later_ones_wrote(file: Path) -> None:
    end(file)
    assert end(file, "data", stopped="data") == ["data"]
    there = {path.name for path in read_config(file).run.iterdir() if path.name in WRITTEN}
    assert there == {"prompts.jsonl", "answers.jsonl", "data"}  # which the stand-in has written again


def test_one_pipeline_at_a_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(*_: object) -> None:
        if "RANK" not in os.environ:
            with pytest.raises(ToolError, match="another process is at work"):
                end(file)
            monkeypatch.setenv("RANK", "1")
            assert "another process is at work" in run("train", "prompts", file).stderr
            assert run("train", "run", file).exit_code == 0  # torchrun's, of which the first has the lock
            monkeypatch.delenv("RANK")

    monkeypatch.setattr(module, "do", second)
    pipeline(file, read_config(file), None)


PROMPTS, KILLS = 40, 6
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"held_out": 8, "max_tokens": 32},
    "head": {"layers": 2, "depths": 4, "aux_layers": [2, 5, 7]},
    "step": {"tokens": 256, "dtype": "float32"},
    "optimizer": {"steps": 12, "lr": 0.001},
    "every": {"checkpoint": 4, "replay": 4},
    "engine": ENGINE,
    "speculators": {"num_workers": 0, "log_freq": 1},
}


def settings(folder: Path) -> Path:
    folder.mkdir()
    rows = (json.dumps({"text": text}) + "\n" for text in heldout()[:PROMPTS])
    (folder / "prompts.jsonl").write_text("".join(rows))
    data = {**SETTINGS["data"], "prompts": ["prompts.jsonl"]}
    file = folder / "peagle.yaml"
    file.write_text(yaml.safe_dump({"target": str(TARGET), **SETTINGS, "data": data}))
    return file


def begin(file: Path) -> subprocess.Popen:
    with (file.parent / "log").open("ab") as out:
        command = [sys.executable, "-m", "peagle_tools.cli", "train", "pipeline", str(file)]
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment(), start_new_session=True)


def digests(file: Path) -> dict[str, Any]:
    """A digest of each file that two runs share; speculators' own notes hold times, and Arrow's a cache key."""
    run = file.parent / "run"
    kept = [run / name for name in ("prompts.jsonl", "answers.jsonl", "al.jsonl", "data/token_freq.pt")]
    kept += [*run.glob("data/*.arrow"), *run.glob("data/hidden_states/*"), *run.glob("checkpoints/step-*/*")]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


@pytest.mark.full
def test_killed_at_random_points_it_ends_with_the_same_files(tmp_path: Path) -> None:
    """kill -9 of the pipeline alone: its steps and servers end with it, and the same command continues."""
    smooth, killed = settings(tmp_path / "smooth"), settings(tmp_path / "killed")
    began = time.monotonic()
    assert begin(smooth).wait() == 0, (smooth.parent / "log").read_text()
    whole, points = time.monotonic() - began, random.Random(0)
    unfinished = 0
    for _ in range(KILLS):
        process = begin(killed)
        try:
            process.wait(points.uniform(1, 0.2 * whole))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            unfinished += 1
    print(f"killed {unfinished} times before it was finished")
    assert begin(killed).wait() == 0, (killed.parent / "log").read_text()
    assert digests(killed) == digests(smooth)
