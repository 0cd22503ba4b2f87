"""Process state that must exist before vLLM is imported.

One pytest process serves one arm, because they need different state:

    PEAGLE_TEST_ARM=plugin-v1   the default: the plugin on the V1 runner, vLLM's C++ stand-ins for Triton
    PEAGLE_TEST_ARM=plugin-v2   the plugin on Model Runner V2; without a GPU every Triton kernel under the interpreter
    PEAGLE_TEST_ARM=stock-v1    vLLM as released, for comparison

A test that needs one arm says so: ``@pytest.mark.arm("plugin-v1", "stock-v1")``. The others are not
collected, so no report lists a skip that only says "run me elsewhere".

Under the interpreter our own kernels take longer than all of vLLM's. So there a test runs their torch twins, unless it
is marked ``kernels``: tests/kernels compares kernels and twins batch by batch, the marked tests run them in engines.
"""

import atexit
import itertools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

ARM = os.environ.get("PEAGLE_TEST_ARM", "plugin-v1")
ARMS = ("plugin-v1", "plugin-v2", "stock-v1")
assert ARM in ARMS, f"PEAGLE_TEST_ARM={ARM}: choose one of {', '.join(ARMS)}"

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process, so that a test can look inside
    VLLM_USE_V2_MODEL_RUNNER="1" if ARM == "plugin-v2" else "0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    HF_HUB_CACHE=tempfile.mkdtemp(prefix="peagle-hub-"),  # what a test puts there, and nothing else
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # else vLLM's CPU build binds every engine on the machine to the same core
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
atexit.register(shutil.rmtree, os.environ["HF_HUB_CACHE"], ignore_errors=True)

import torch  # noqa: E402  (it reads the number of threads)

# vLLM's attention for CPUs with AMX rounds the probabilities to bfloat16, which the reference does not: three times as
# many bfloat16 drafts are ties as on other CPUs. Its vector form is what both are compared on, on every machine.
torch.cpu._is_amx_tile_supported = lambda: False

HAS_GPU = torch.cuda.is_available()
if ARM == "plugin-v2" and not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
if ARM == "stock-v1":
    os.environ["PEAGLE_VLLM_DISABLE"] = "1"


@pytest.fixture(autouse=True)
def twins_or_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if ARM == "plugin-v2" and not HAS_GPU and not request.node.get_closest_marker("kernels"):
        monkeypatch.setattr("peagle_kernels.dispatch.INTERPRETED", False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny target."""
    from tests.support.random_heads import write_target

    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="module")
def pair(target: Path) -> tuple[Path, Path]:
    """It, and a head for it."""
    from tests.support.random_heads import HeadSpec, write_head

    return target, write_head(target.with_name("head"), target, HeadSpec())


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """``warned(text)``: the plugin's warnings so far that hold this text, whatever vLLM makes of its loggers."""
    from vllm.logger import _print_warning_once

    _print_warning_once.cache_clear()  # what another test of this process has caused is said again
    lines: list[str] = []
    logger = logging.getLogger("vllm.peagle")
    monkeypatch.setattr(logger, "warning", lambda line, *args, **_: lines.append(line % args if args else line))
    return lambda text: [line for line in lines if text in line]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests of an arm run (``-m arm``), a file that has none is not imported: that can take seconds."""
    is_test = collection_path.name.startswith("test_") and config.option.markexpr.lstrip("(").startswith("arm")
    return True if is_test and "mark.arm(" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def elsewhere(item: pytest.Item) -> bool:
        mark = item.get_closest_marker("arm")  # a test's own mark narrows its module's
        return mark is not None and ARM not in mark.args

    from tools import interpreter

    # The mutants' processes have vLLM imported, and the interpreter enabled before.
    if ARM == "plugin-v2" and not HAS_GPU and "vllm.triton_utils" in sys.modules and not interpreter.is_enabled():
        raise pytest.UsageError("a test imports vLLM while it is collected, before Triton's interpreter is enabled")
    config.hook.pytest_deselected(items=list(filter(elsewhere, items)))
    items[:] = itertools.filterfalse(elsewhere, items)


def pytest_sessionfinish() -> None:
    """Tear the last engine down here: at interpreter exit its process group would complain."""
    if "tests.support.engines" in sys.modules:
        sys.modules["tests.support.engines"].shut_down()
