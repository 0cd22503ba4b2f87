"""Where a head is found: a folder, the cache, the hub's headers, or nowhere, with the reason."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

from peagle_tools.inspect.head_report import report
from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.files import SELECTOR_FOLDER, NotFoundError, RemoteHead, download, find, path_fault
from peagle_vllm.heads.head import read_head
from tests.heads.test_selector import sharpened
from tests.heads.writers import SERVED, TARGET, speculators

REPO, COMMIT = "some/head", "a" * 40


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


def hub_of(head, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A hub that answers for ``head`` without weights."""
    saved = read_head(head.save(folder))
    files: dict[str, SimpleNamespace] = {}
    for info in saved.tensors.values():
        file = files.setdefault(info.file, SimpleNamespace(tensors={}))
        offsets = (info.offset, info.offset + info.num_bytes)
        file.tensors[info.name] = SimpleNamespace(shape=list(info.shape), dtype=info.dtype, data_offsets=offsets)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        huggingface_hub, "get_safetensors_metadata", lambda *a, **k: SimpleNamespace(files_metadata=files)
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: str(folder / "config.json"))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_cached_head_is_its_snapshot(shards: int, tmp_path: Path):
    """But not without all of its weights."""
    head = speculators()
    head.shards = shards
    snapshot = head.save(cache(tmp_path))
    assert find(REPO) == find(REPO, revision=COMMIT) == download(REPO) == snapshot
    assert find(str(snapshot)) == snapshot
    assert read_head(snapshot).commit == COMMIT
    next(snapshot.glob("*.safetensors")).unlink()
    for revision in (None, "b" * 40):
        with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE is set"):
            find(REPO, revision)


def test_a_cached_head_without_its_selector_is_not_whole(tmp_path: Path):
    """vLLM fetches what the index names, which leaves the selector out."""
    folder = sharpened(SERVED["vllm-llama"](), cache(tmp_path))
    assert find(REPO) == folder
    (folder / SELECTOR_FOLDER / "model.safetensors").unlink()
    with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE is set"):
        download(REPO)


def test_the_hub_gives_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights are fetched only by what needs them, and a sharpened head's selector with them."""
    hub_of(SERVED["aws"](), monkeypatch, tmp_path / "origin")
    asked: list[tuple] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path))
    remote = find(REPO)
    assert isinstance(remote, RemoteHead)
    head = read_head(remote)
    assert (head.dialect, head.name, head.folder) == ("aws", REPO, None)
    assert head.mask_hidden() is None
    assert check_pair(head, TARGET, num_speculative_tokens=5) == [] == asked
    assert download(REPO, "main") == tmp_path
    (((name,), options),) = asked
    assert (name, options["revision"]) == (REPO, "main")
    files = ["config.json", "model.safetensors", f"{SELECTOR_FOLDER}/model.safetensors", "README.md"]
    for patterns in (options["allow_patterns"], ["*.safetensors"]):  # a vLLM that finds no index asks for the latter
        assert files[2] in huggingface_hub.utils.filter_repo_objects(files, allow_patterns=patterns)


def test_headers_are_those_of_the_configs_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A branch may move between the two requests. ``inspect`` then names the commit for the speculative config."""
    hub_of(speculators(), monkeypatch, tmp_path / "snapshots" / COMMIT)
    headers, revisions = huggingface_hub.get_safetensors_metadata, []
    monkeypatch.setattr(
        huggingface_hub, "get_safetensors_metadata", lambda *a, **k: revisions.append(k["revision"]) or headers()
    )
    head = read_head(find(REPO, "main"))
    assert revisions == [head.commit] == [COMMIT]
    data = report(head, [])
    assert data["commit"] == COMMIT
    assert data["speculative_config"]["model"] == REPO and data["speculative_config"]["revision"] == COMMIT


@pytest.mark.parametrize("error", [OSError("no network\nat all"), RuntimeError("?"), ValueError("not a repository")])
def test_what_is_not_found_has_a_reason(error: Exception, monkeypatch: pytest.MonkeyPatch):
    for name in ("no such folder/at all", "s3://bucket/head", "x" * 5000, "a\0b"):
        with pytest.raises(NotFoundError):
            find(name)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(NotFoundError) as raised:
        find(REPO)
    reason = " ".join(str(error).splitlines())
    assert str(raised.value).startswith(f"{REPO} is not a folder, and the hub does not give it ({reason})")


@pytest.mark.parametrize("name", ["/no/such", "./such", "../such", "~/such", "no/such/head", "/no/" + 300 * "x"])
def test_a_path_that_leads_nowhere_is_no_name_on_the_hub(name: str):
    line = path_fault(name)
    assert line is not None and line.startswith(f"{name} is not on this machine")
    assert ("home folder" in line) == name.startswith("~")


@pytest.mark.parametrize("name", ["head", REPO, "s3://some/bucket/head"])
def test_what_may_be_somewhere_else_is_no_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert path_fault(str(tmp_path)) is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "model_info", None)  # the hub is not asked
    assert path_fault(name) is None


@pytest.mark.parametrize("name", ["a b", "own\\head", "x" * 5000, "a\0b", "-head"])
def test_what_can_be_no_name_on_the_hub_is_a_fault(name: str):
    line = path_fault(name)
    assert line is not None and "is not on this machine, and the hub does not give it" in line


def test_offline_only_the_cache_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    line = path_fault(REPO)
    assert line is not None and "not in the hub's cache, and HF_HUB_OFFLINE is set" in line
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert path_fault(REPO) is None
    monkeypatch.delenv("VLLM_USE_MODELSCOPE")
    (speculators().save(cache(tmp_path)) / "model.safetensors").unlink()  # vLLM may have its weights elsewhere
    assert path_fault(REPO) is None


def test_beside_a_folder_of_this_name_the_hub_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``models/nope`` may be a name on the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked = []

    def model_info(name: str, *, revision: str | None, timeout: float) -> None:
        asked.append((name, revision, timeout))
        if name == REPO:
            raise OSError("Repository Not Found")

    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    assert path_fault(REPO) is None and not asked
    (tmp_path / "some").mkdir()
    line = path_fault(REPO, "main")
    assert line is not None and line.startswith(f"{REPO} is not on this machine, and the hub does not give it")
    assert asked == [(REPO, "main", 5)]
    assert path_fault("some/other") is None
