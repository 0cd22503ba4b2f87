"""Hidden states in shards: what is trained on them, and that pack can be killed anywhere."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk

from peagle_tools.train import TrainError, shards, steps
from peagle_tools.train.config import Config, read_config
from tests.train.runs import result, toy_run, train

SHORT: dict[str, dict[str, Any]] = {"optimizer": {"steps": 4}, "every": {"checkpoint": 4, "replay": 4}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 40_000)
    monkeypatch.setattr("peagle_tools.train.trainer.write_plots", lambda run: None)


def packed(folder: Path) -> Path:
    """peagle.yaml of a run whose hidden states are in shards."""
    file = toy_run(folder, data={"backend": "shards"}, **SHORT)
    pack(read_config(file))
    return file


def pack(config: Config) -> None:
    shards.pack(states(config), (length * 4 * 16 * 4 for length in rows(config)["seq_len"]))


def states(config: Config) -> Path:
    return config.data_folder / "hidden_states"


def rows(config: Config) -> Any:
    return load_from_disk(str(config.data_folder)).with_format(None)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_it_trains_as_from_files(tmp_path: Path) -> None:
    files, in_shards = toy_run(tmp_path / "files", **SHORT), packed(tmp_path / "shards")
    names = [file.name for file in states(read_config(in_shards)).iterdir()]
    assert 3 < len(names) < 12 and all(name.startswith("rows-") for name in names)
    for file in (files, in_shards):
        train(file)
    assert result(in_shards) == result(files)


def test_killed_anywhere_pack_ends_with_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each write, new name and removal, one after the other; each time the same command goes on."""
    wanted = contents(states(read_config(packed(tmp_path / "undisturbed"))))
    config, left = read_config(toy_run(tmp_path / "killed", data={"backend": "shards"})), [0]

    write = shards.save_file

    def killing(work: Callable) -> Callable:
        def wrapped(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                if work is write:
                    Path(args[1]).write_bytes(b"half")
                raise KeyboardInterrupt
            return work(*args, **options)

        return wrapped

    for of, name in ((shards, "sync"), (shards, "save_file"), (Path, "rename"), (Path, "unlink")):
        monkeypatch.setattr(of, name, killing(getattr(of, name)))
    for kills in range(200):
        left[0] = kills
        try:
            pack(config)
            break
        except KeyboardInterrupt:
            continue
    monkeypatch.undo()
    assert 9 < kills < 199 and contents(states(config)) == wanted


def test_a_spoiled_shard_is_found(tmp_path: Path) -> None:
    """train run refuses it; train states takes all its documents for missing, and no other ones."""
    file = packed(tmp_path / "run")
    config = read_config(file)
    second = sorted(states(config).iterdir())[1]
    _, first, last = second.stem.split("-")
    os.truncate(second, second.stat().st_size - 7)
    lost = [*range(int(first), int(last) + 1)]
    with pytest.raises(TrainError, match=f"{len(lost)} of 24 files of hidden states are missing or cut off"):
        train(file)
    assert steps._wrong(config, rows(config)) == lost
    assert not second.exists()
