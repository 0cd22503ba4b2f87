"""The order of the steps, what is skipped, and what is refused; the steps are stand-ins that write a file."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peagle_tools.cli import app
from peagle_tools.shared.errors import ToolError
from peagle_tools.train import pipeline as module
from peagle_tools.train import steps
from peagle_tools.train.lines import write_lines
from peagle_tools.train.peagle_yaml import Config, Data, read_config
from peagle_tools.train.pipeline import SPECULATORS, STEPS, _run, pipeline
from tests.support.models import MODELS, TARGET

NAMES = list(STEPS)
WRITTEN = [name for _, writes in STEPS.values() for name in writes]


class Steps:
    """Runs no step, but notes it and writes its first file; ``fails`` is the status of the step of this name."""

    def __init__(self, config: Config, **fails: int):
        self.config, self.fails = config, fails
        self.ran: list[str] = []

    def __call__(self, step: str, file: Path, config: Config) -> int:
        self.ran.append(step)
        for path in (self.config.run / name for name in STEPS[step][1][:1]):
            path.write_text(step) if path.suffix else path.mkdir(parents=True, exist_ok=True)
        return self.fails.get(step, 0)


def end(file: Path, begin: str | None = None, **fails: int) -> tuple[int, list[str]]:
    """The status that the pipeline ends with, begun at a step, and the steps that it ran."""
    config = read_config(file)
    steps = Steps(config, **fails)
    return pipeline(file, config, begin, steps), steps.ran


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
    assert end(file, states=75) == (75, NAMES[: at + 1])
    assert end(file) == (0, NAMES[at:])
    assert end(file) == (0, [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_training_once_and_its_end_is_waited_for(number: int, tmp_path: Path) -> None:
    """Training saves its step at the first one, and ends at once at a second one, so a terminal may not send it too."""
    child = "import os, pathlib, signal, sys, time; got = []\n"
    child += "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, lambda *_: got.append(1))\n"
    child += f"pathlib.Path({str(tmp_path / 'there')!r}).touch()\n"
    child += "while not got: time.sleep(0.01)\n"
    child += "time.sleep(0.5); sys.exit(75 if len(got) == 1 and os.getsid(0) == os.getpid() else 1)"

    def stop() -> None:
        while not (tmp_path / "there").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    assert _run([sys.executable, "-c", child]) == 75


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("folder: 2024-13-45", " no YAML: "),
        ('folder: "\x01"', " no YAML: "),
        ("engine: {dtype: [bfloat16]}", r"2: engine: dtype is \['bfloat16'\]"),
        ("engine: {dtype: auto}", "2: engine: dtype is 'auto', which does not say how hidden states"),
        ("data: {endpoint: 'http://localhost:99999/v1'}", "2: data.endpoint: Port out of range"),
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
    ended = CliRunner().invoke(app, ["train", "data", str(file)])
    assert ended.exit_code == 2 and ended.stderr.startswith(
        "peagle-vllm: speculators 0.10.0 is installed, and training"
    )
    assert f"pip install --no-deps speculators=={SPECULATORS} hs-connectors=={SPECULATORS}\n" in ended.stderr


def test_other_settings_are_refused_until_the_step_is_done_again(file: Path) -> None:
    """Also where the step was only begun: half of its answers would be of other settings."""
    assert end(file, answers=75) == (75, NAMES[:2])
    written(file.parent, 16)
    with pytest.raises(ToolError, match=r"answers was begun with other settings .* `--from answers`"):
        end(file)
    assert end(file, "answers", answers=2) == (2, ["answers"])
    (read_config(file).run / "answers.jsonl").unlink()  # where nothing is written, other settings may be tried
    assert end(written(file.parent, 32)) == (0, NAMES[1:])
    (file.parent / "source.jsonl").write_text('{"prompt": "y"}\n')
    with pytest.raises(ToolError, match="prompts was begun with other settings or data"):
        end(file)


def test_the_steps_dtype_leaves_answers_and_hidden_states_as_they_are(file: Path) -> None:
    """The server's own dtype is another: with that, answers are others."""
    assert end(file, run=2) == (2, NAMES[:-1])
    shutil.rmtree(read_config(file).run / "checkpoints")  # nothing is trained yet
    assert end(written(file.parent, 8, "step: {dtype: float32}\nengine: {dtype: bfloat16}\n")) == (0, ["run", "check"])
    written(file.parent, 8, "step: {dtype: float32}\nengine: {dtype: float32}\n")
    with pytest.raises(ToolError, match="answers was begun with other settings"):
        end(file)


def test_a_target_is_enough(tmp_path: Path) -> None:
    """Prompts of the target's own need no data set; with other ones, or measured prompts, the step is another one."""
    file = tmp_path / "peagle.yaml"
    (tmp_path / "measured.jsonl").write_text('{"prompt": "x"}\n')

    def write(**data: Any) -> Path:
        file.write_text(json.dumps({"target": str(TARGET), "data": data}))
        return file

    data = {"from_target": 9, "apart_from": ["measured.jsonl"]}
    assert end(write(**data)) == (0, NAMES)
    for change in ({"from_target": 10}, {"sampling": {"top_p": 1}}, {"apart_from": []}):
        with pytest.raises(ToolError, match="prompts was begun with other settings"):
            end(write(**data | change))
    ended = CliRunner().invoke(app, ["train", "prompts", str(write())])
    assert ended.exit_code == 2 and "data.prompts: is empty; name files, or data sets of the hub" in ended.stderr


def test_doing_a_step_again_removes_what_it_and_later_ones_wrote(file: Path) -> None:
    end(file)
    kept = {"prompts.jsonl", "answers.jsonl"}
    assert end(file, "data", data=2) == (2, ["data"])
    there = {path.name for path in read_config(file).run.iterdir() if path.name in WRITTEN}
    assert there == kept | {"data"}  # which the stand-in has written again


def test_one_pipeline_at_a_time(file: Path) -> None:
    config = read_config(file)

    class Second(Steps):
        def __call__(self, step: str, file: Path, config: Config) -> int:
            with pytest.raises(ToolError, match="another pipeline is at work"):
                end(file)
            return 75

    assert pipeline(file, config, None, Second(config)) == 75


def test_answers_to_prompts_that_are_gone_are_refused(file: Path) -> None:
    config = Config(target=str(TARGET), folder=str(file.parent / "run"), data=Data(held_out=1))
    config.run.mkdir(parents=True)
    write_lines(config.run / "prompts.jsonl", [{"id": key, "messages": []} for key in "ab"])
    write_lines(config.run / "answers.jsonl", [{"primary_id": key} for key in "bc"])
    with pytest.raises(ToolError, match=r"answers.jsonl: 1 of its prompts are not in .*prompts.jsonl; remove it, or"):
        steps.answers(config)
