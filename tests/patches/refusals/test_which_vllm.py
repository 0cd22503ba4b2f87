"""Which vLLM is served: any whose definitions are as recorded, and one whose user accepts that they differ."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from peagle_vllm import patches
from peagle_vllm.patches import drafter_limit, fingerprint
from peagle_vllm.patches.ledger import Definition
from peagle_vllm.patches.source import Source
from tests.patches.refusals.conftest import configure, refusal

pytestmark = pytest.mark.arm("plugin-v1")


@pytest.fixture
def a_new_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of its own, what is logged and checked once a start is logged and checked again."""
    monkeypatch.delenv("PEAGLE_VLLM_ACCEPT", raising=False)
    patches.refuse_if_changed.cache_clear()
    yield
    patches.refuse_if_changed.cache_clear()


@pytest.fixture
def changed(a_new_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that differs from every recorded one at two patches."""
    recorded = fingerprint.load_recorded()
    for build in (build for builds in recorded.values() for build in builds.values()):
        for name in ("vllm.v1.spec_decode.eagle:EagleProposer", "vllm.utils.cpu_triton_utils:_expand_kernel_impl"):
            assert name in build
            build[name] = "0" * 16  # type: ignore[index]
    monkeypatch.setattr(fingerprint, "load_recorded", lambda: recorded)


@pytest.mark.usefixtures("changed")
def test_a_changed_patch(target: Path, head: Path):
    """P-EAGLE is refused by name; the same target without it is configured as ever."""
    line = refusal(target, head)
    assert "differs from what peagle-vllm was checked against at the patch v1-proposer, cpu-sampling" in line
    assert "PEAGLE_VLLM_ACCEPT=v1-proposer,cpu-sampling serves it all the same" in line

    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(model=str(target), skip_tokenizer_init=True).create_engine_config()


@pytest.mark.usefixtures("changed")
def test_a_changed_patch_is_let_in_by_name(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, warned):
    monkeypatch.setenv("PEAGLE_VLLM_ACCEPT", "v1-proposer")
    assert "at the patch cpu-sampling;" in refusal(target, head)
    monkeypatch.setenv("PEAGLE_VLLM_ACCEPT", "cpu-sampling, v1-proposer,gate")
    for _ in range(2):
        assert configure(target, head).speculative_config.parallel_drafting
    (warning,) = warned("PEAGLE_VLLM_ACCEPT")
    assert "at the patch v1-proposer, cpu-sampling" in warning and "gate" not in warning


@pytest.mark.usefixtures("a_new_start")
def test_what_is_gone_cannot_be_accepted(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch):
    def digest(self: Source, definition: Definition) -> str | None:
        return None if definition.qualname.endswith("_input_fits_in_drafter") else whole(self, definition)

    whole = Source._digest
    monkeypatch.setattr(Source, "_digest", digest)
    monkeypatch.setenv("PEAGLE_VLLM_ACCEPT", "drafter-limit")
    line = refusal(target, head)
    assert "at the patch drafter-limit;" in line
    assert line.endswith("GPUModelRunner._input_fits_in_drafter is gone, so PEAGLE_VLLM_ACCEPT does not help")


def test_a_patch_that_does_not_fit_leaves_vllm_alone(warned):
    """A vLLM without what a patch wraps: the import goes on, and says so."""
    ((name, hook),) = drafter_limit.PATCH.hooks
    for each in (hook, lambda _: import_module("vllm.gone")):
        patches._install(drafter_limit.PATCH, each, ModuleType(name))
    assert len(warned("the patch drafter-limit does not fit this vLLM")) == 2
