"""Where a head is found: a folder, the cache, the hub's headers, or nowhere, with the reason."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants

from peagle_tools.inspect.head_report import report
from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.files import SELECTOR_FOLDER, HeadError, HeadFiles, download, find
from peagle_vllm.heads.head import read_head
from tests.heads.test_fields import sharpened
from tests.heads.writers import FOREIGN, SERVED, TARGET, Written, speculators

REPO, COMMIT, NEWER = "some/head", "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def cache(tmp_path: Path) -> Path:
    """The snapshot folder of REPO's main branch in an otherwise empty cache."""
    repo = tmp_path / "hub" / "models--some--head"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return repo / "snapshots" / COMMIT


def hub_of(head: Written, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """A hub that answers for ``head`` without weights. Returns the revisions whose headers were asked for."""
    saved, revisions = read_head(head.save(folder)), []
    tensors = {
        info.name: SimpleNamespace(shape=list(info.shape), dtype=info.dtype, data_offsets=(0, info.num_bytes))
        for info in saved.tensors.values()
    }
    (folder / "model.safetensors").unlink()
    headers = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        huggingface_hub, "get_safetensors_metadata", lambda *a, revision: revisions.append(revision) or headers
    )
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *a, **k: SimpleNamespace(sha=folder.name))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: str(folder / "config.json"))
    return revisions


@pytest.mark.parametrize("shards", [1, 2])
def test_a_cached_head_is_its_snapshot(shards: int, tmp_path: Path):
    """But not without all of its weights."""
    head = speculators()
    head.shards = shards
    snapshot = head.save(cache(tmp_path))
    assert find(REPO) == find(REPO, revision=COMMIT) == download(REPO) == snapshot
    assert find(str(snapshot)) == snapshot
    config = report(read_head(snapshot), [])["speculative_config"]
    assert (config["model"], config["revision"]) == (REPO, COMMIT)  # no path of this machine
    other = head.save(tmp_path / "snapshots" / "step-100")  # of a training, say
    assert report(read_head(other), [])["speculative_config"].items() >= {"model": str(other)}.items()
    next(snapshot.glob("*.safetensors")).unlink()
    for revision in (None, "b" * 40):
        with pytest.raises(HeadError, match="HF_HUB_OFFLINE is set"):
            find(REPO, revision)


def test_the_hubs_client_is_loaded_as_far_as_is_needed(tmp_path: Path):
    """In a process that has imported nothing of it."""
    speculators().save(cache(tmp_path))
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [sys.executable, "-m", "peagle_tools.cli", "inspect", REPO]
    assert subprocess.run(command, env=env, capture_output=True, check=False).returncode == 0


def test_specforge_states_fields_beside_the_config_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / NEWER
    hub_of(FOREIGN["specforge"](), monkeypatch, folder)

    def fetch(_: str, name: str, **__: Any) -> str:
        if name == "peagle_config.json":
            (folder / name).write_text('{"mask_token_id": 7}')
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert read_head(find(REPO)).mask_token_id == 7


def test_a_cached_head_without_its_selector_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM fetches what the index names, which leaves the selector out. A whole one needs no connection."""
    folder = sharpened(SERVED["vllm-llama"](), cache(tmp_path))
    with monkeypatch.context() as unreachable:
        unreachable.setattr(constants, "HF_HUB_OFFLINE", False)
        unreachable.setattr(huggingface_hub, "model_info", Mock(side_effect=OSError))
        assert find(REPO) == folder
    (folder / SELECTOR_FOLDER / "model.safetensors").unlink()
    with pytest.raises(HeadError, match="HF_HUB_OFFLINE is set"):
        download(REPO)


def test_the_hub_gives_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights are fetched only by what needs them, and a sharpened head's selector with them.

    A branch may move between two requests, so the headers are those of the config's commit, which ``inspect`` names.
    """
    revisions = hub_of(SERVED["aws"](), monkeypatch, tmp_path / "models--some--head/snapshots" / NEWER)
    asked: list[tuple] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path))
    speculators().save(cache(tmp_path))  # main, as it was when it was fetched
    remote = find(REPO, "main")
    assert isinstance(remote, HeadFiles)
    head = read_head(remote)
    assert (head.name, head.folder) == (REPO, None)
    assert head.array("mask_hidden") is None
    assert check_pair(head, TARGET, num_speculative_tokens=5) == [] == asked
    assert revisions == [head.commit] == [NEWER]
    assert report(head, [])["speculative_config"]["revision"] == NEWER
    assert download(REPO, "main") == tmp_path
    (((name,), options),) = asked
    assert (name, options["revision"]) == (REPO, "main")
    files = ["config.json", "model.safetensors", f"{SELECTOR_FOLDER}/model.safetensors", "README.md"]
    for patterns in (options["allow_patterns"], ["*.safetensors"]):  # a vLLM that finds no index asks for the latter
        assert files[2] in huggingface_hub.utils.filter_repo_objects(files, allow_patterns=patterns)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/no/such", "Repo id must be"),
        (REPO, "it is not in the hub's cache, and HF_HUB_OFFLINE is"),
        ("own\\head", "Repo id must use"),
        ("x" * 5000, ""),
        ("a\0b", ""),
    ],
)
def test_what_is_not_found_has_a_reason(name: str, reason: str):
    with pytest.raises(HeadError) as raised:
        find(name)
    name = name.replace("\0", r"\x00")  # a line has printable characters only
    assert str(raised.value).startswith(f"{name} is not a folder, and the hub does not give it ({reason}")
    assert str(raised.value).endswith("); check the name and the connection, or name a folder")
