"""Where a head is found: a folder, the cache, the hub's headers, or not before vLLM has fetched it."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

from peagle_tools.inspect.report import report
from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.files import HeadError, RemoteHead, download, find, locate, path_fault
from peagle_vllm.heads.head import read_head
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


def test_a_folder_is_itself(tmp_path: Path):
    assert locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("shards", [1, 2])
def test_a_cached_head_is_its_snapshot(shards: int, tmp_path: Path):
    head = speculators()
    head.shards = shards
    snapshot = head.save(cache(tmp_path))
    assert locate(REPO) == snapshot
    assert locate(REPO, revision=COMMIT) == snapshot
    assert read_head(snapshot).commit == COMMIT
    assert locate(REPO, revision="b" * 40) is None


def test_a_half_cached_head_is_not_taken(tmp_path: Path):
    head = speculators()
    head.shards = 2
    snapshot = head.save(cache(tmp_path))
    next(snapshot.glob("*.safetensors")).unlink()
    assert locate(REPO) is None


@pytest.mark.parametrize("name", ["some/unknown", "no such folder/at all", "s3://bucket/head", "x" * 5000, "a\0b"])
def test_an_unknown_name_gives_none(name: str):
    assert locate(name) is None


def test_the_hub_gives_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub_of(SERVED["aws"](), monkeypatch, tmp_path / "origin")
    remote = locate(REPO)
    assert isinstance(remote, RemoteHead)
    head = read_head(remote)
    assert (head.dialect, head.name, head.folder) == ("aws", REPO, None)
    assert head.mask_hidden() is None
    assert check_pair(head, TARGET, num_speculative_tokens=5) == []


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
    assert (data["commit"], data["sha256"]) == (COMMIT, None)
    assert data["speculative_config"]["model"] == REPO and data["speculative_config"]["revision"] == COMMIT


@pytest.mark.parametrize("error", [OSError("no network"), RuntimeError("?"), ValueError("not a repository")])
def test_a_failing_hub_never_breaks_serving(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    assert locate(REPO) is None


def test_find_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(HeadError, match="HF_HUB_OFFLINE is set"):
        find(REPO)
    head = speculators().save(cache(tmp_path))
    assert find(REPO) == download(REPO) == head

    def fail(*args, **kwargs):
        raise OSError("no network\nat all")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(
        HeadError, match=r"other/head is not a folder, and the hub does not give it \(no network at all\)"
    ):
        find("other/head")


def test_a_tool_fetches_weights_only_when_it_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub_of(speculators(), monkeypatch, tmp_path / "origin")
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path))
    assert isinstance(find(REPO), RemoteHead) and not asked
    assert download(REPO, "main") == tmp_path
    assert asked == [((REPO,), {"revision": "main", "allow_patterns": ["*.json", "*.safetensors"]})]


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
