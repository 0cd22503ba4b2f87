"""What the seams use of vLLM is found, recorded and therefore guarded."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import peagle_vllm
from peagle_vllm.patches import all_seams, drafter_limit, gate, proposer
from peagle_vllm.patches.fingerprint import check, load_recorded
from peagle_vllm.patches.ledger import Definition, Seam
from peagle_vllm.patches.source import Source
from peagle_vllm.patches.version import VllmInstall, read
from tests.patches.attributes import attributes_named, attributes_read
from tests.patches.trees import change, copy_of_used, installed, next_release
from tools.seams import record, uses

PACKAGE = Path(peagle_vllm.__file__).parent
RELEASES = pytest.mark.parametrize("release", [installed, next_release], ids=["installed", "next"])
# In `make test` the finder reads the installed release only; test_fingerprint.py compares what is recorded of both.
ONE_RELEASE = pytest.mark.parametrize(
    "release", [installed, pytest.param(next_release, marks=pytest.mark.full)], ids=["installed", "next"]
)


@ONE_RELEASE
def test_what_is_used_is_what_is_recorded(release: Callable[[], VllmInstall]) -> None:
    """Of every recorded build: where two builds of a version differ in it, both are recorded again."""
    install = release()
    now = {seam: sorted(found) for seam, found in record.fingerprints(install).items()}
    for label, build in load_recorded()[install.minor].items():
        recorded = {seam: sorted(keys) for seam, keys in build.items()}
        assert now == recorded, f"record {label} again: python -m tools.seams.record"


def test_recording_a_build_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seams = (gate.SEAM, proposer.SEAM)
    monkeypatch.setattr(record, "all_seams", lambda: seams)
    root = copy_of_used(tmp_path)
    change(root, "vllm.v1.spec_decode.llm_base_proposer", "def dummy_run(", "def dummy_run_2(")
    install = read(root)
    old = {"gate": {"vllm.gone:Gone called body": "0"}}
    before = {install.minor: {install.label: {}, "vllm old": old}, "0.1": {"vllm 0.1.0": old}}
    after = record.record(install, before)
    assert list(after) == ["0.1", install.minor]
    assert after["0.1"]["vllm 0.1.0"] == after[install.minor]["vllm old"] == old
    assert set(after[install.minor][install.label]) == {seam.name for seam in seams}
    assert not any("dummy_run " in key for key in after[install.minor][install.label]["proposer"])
    assert check(root, seams, {install.minor: {install.label: after[install.minor][install.label]}}).ok


# --------------------------------------------------------------------------------------- the finder

VLLM = {
    "config.py": """
class Config:
    size: int
    depth: int = 1
    def grow(self): return self.size
""",
    "base.py": """
from vllm.config import Config

class Root:
    def __init__(self, config: Config): self.config, self.count = config, 0
    def load(self): self.loaded = True
    def step(self): return self.sample()
    def sample(self): return 1
    def unused(self): pass

class Base(Root):
    def load(self): super().load()

def helper(): pass
def other(): pass
class Given: pass
class Loaded:
    def forward(self): pass
""",
}
OURS = """
from vllm.base import Base, Given, Loaded, helper, other
from vllm.config import Config
class Ours(Base):
    def load(self):
        super().load()
        self.read(self.config)
    def sample(self) -> int:
        return self.count
    def read(self, config: Config):
        return [each.size for each in (config,)]
def call(given: Given) -> "other":
    helper()
    untyped().forward()
"""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], set[str]]:
    """What a seam of this code uses, each as "name how what"."""
    from tests.patches.trees import fake

    vllm = Source(fake(tmp_path / "vllm", VLLM))

    def find(code: str) -> set[str]:
        seams = tmp_path / str(hash(code)) / "peagle_vllm" / "seams"
        seams.mkdir(parents=True)
        (seams / "x.py").write_text(code)
        monkeypatch.setattr("tools.seams.code.OURS", Source(seams.parents[1]))
        seam = Seam(name="x", runner="V2", why="", waits_for="", delete_when="", types={"untyped": ()})
        return {each.key.partition(":")[2] for each in uses.uses(seam, vllm)}

    return find


def test_what_is_found(found: Callable[[str], set[str]]) -> None:
    assert found(OURS) == {
        "Base replaced body",  # with its own load
        "Root.load inherited body",  # by super() of Base
        "Root.step inherited body",  # calls sample
        "Root.sample replaced body",
        "Root.config inherited body",
        "Root.count inherited body",
        "Config.size called body",
        "helper called body",
    }


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("other()", "other called body"),
        ("Given()", "Given called signature"),
        ("isinstance(given, Loaded)", "Loaded called signature"),
        ("def more(config: Config): config.depth", "Config.depth called body"),
        ("def more(config: 'Config | None'): config.depth", "Config.depth called body"),
        ("def more(configs: list[Config]): configs[0].depth", "Config.depth called body"),
        ("def more(configs: list[Config]): [a.depth for a in configs]", "Config.depth called body"),
        ("def more(config: Config): getattr(config, 'depth', 1)", "Config.depth called body"),
        ("def more(config: Config): config.depth = 2", "Config.depth replaced body"),
        ("def more(config: Config): again(config)\ndef again(it): it.grow()", "Config.grow called body"),
        ("def more(ours: Ours): ours.config.depth", "Config.depth called body"),
        ("def more(ours: Ours): ours.unused()", "Root.unused inherited body"),
        ("def more():\n    from vllm.base import other\n    other()", "other called body"),
        ("def more(loaded: Loaded): loaded()", "Loaded.forward called body"),
    ],
)
def test_a_new_use_is_found(found: Callable[[str], set[str]], line: str, name: str) -> None:
    assert found(OURS + line) == found(OURS) | {name}


def test_a_seam_that_wraps_what_is_not_there_cannot_be_recorded(tmp_path: Path) -> None:
    root = copy_of_used(tmp_path)
    change(root, "vllm.v1.worker.gpu_model_runner", "def _input_fits_in_drafter(", "def _fits(")
    with pytest.raises(LookupError, match=r"drafter-limit wraps .*_input_fits_in_drafter"):
        uses.uses(drafter_limit.SEAM, Source(root))


# ---------------------------------------------------------------- what the finder could not see

# Attributes that are read by name and are none of vLLM's.
OTHERS = {
    "draft_stats",  # ours
    "drafts_up_to_max_model_len",  # ours
    "inc",  # of Prometheus's counters
    "labels",
    "selector_top_k",  # ours
    "mask_hidden",  # a buffer that the heads register in __init__, which is compared whole
    "value",  # of an Enum
    # a head's config.json
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "layer_types",
    "num_aux_hidden_states",
    "num_hidden_layers",
}


@RELEASES
def test_no_attribute_of_vllms_objects_is_read_that_no_definition_names(release: Callable[[], VllmInstall]) -> None:
    """By name alone, whatever object it is read of: a second look, at what the finder has no type for."""
    install = release()
    builds = load_recorded()[install.minor].values()
    definitions = {Definition.of_key(key) for build in builds for own in build.values() for key in own}
    files = [file for room in ("v1", "v2", "seams") for file in (PACKAGE / room).glob("*.py")]
    served = [file for file in files if file.parent.name != "seams" or "\nSEAM = " in file.read_text()]
    named = attributes_named(Source(install.root), definitions)
    read = {file: attributes_read(file) - named - OTHERS for file in served if file.name != "memory.py"}
    assert len(read) > 10
    assert not any(read.values()), {file.name: names for file, names in read.items() if names}


def test_every_hint_is_found_somewhere() -> None:
    keys = {
        key for builds in load_recorded().values() for build in builds.values() for own in build.values() for key in own
    }
    named = {(each.module, each.qualname) for each in map(Definition.of_key, keys)}
    for seam in all_seams():
        for module, names in seam.also.items():
            missing = [name for name in names if not {(module, name), (module, name.rpartition(".")[0])} & named]
            assert not missing, (seam.name, module, missing)


# ------------------------------------------------------------------------------------- who may import what

TOOLS = {
    # Its one engine changes the loaded head in place, rope included.
    "diagnose": {"vllm", "vllm.config", "vllm.model_executor.layers.rotary_embedding"},
    # `vllm bench serve` itself, which vLLM's CPU build has no command for.
    "bench": {"vllm.benchmarks.serve", "vllm.utils.argparse_utils"},
    "drafting.py": {"vllm.engine.arg_utils", "vllm.usage.usage_lib"},
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_import_only_what_vllm_offers_its_users(tool: str) -> None:
    files = [PACKAGE / tool] if tool.endswith(".py") else (PACKAGE / tool).rglob("*.py")
    trees = [ast.parse(file.read_text()) for file in files]
    assert trees
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes}
    assert {module for module in modules if module and module.split(".")[0] == "vllm"} == TOOLS[tool]


def test_serving_imports_none_of_the_tools() -> None:
    """Neither the plugin nor what it installs needs them; ``cli`` and ``commands`` do."""
    rooms = ("heads", "seams", "v1", "v2")
    for file in (file for room in rooms for file in (PACKAGE / room).glob("*.py")):
        for tool in (*TOOLS, "commands", "doctor", "cli"):
            assert f"peagle_vllm.{tool.removesuffix('.py')}" not in file.read_text(), (
                f"{file.relative_to(PACKAGE)} imports {tool}"
            )


def test_every_declared_seam_is_installed_by_a_hook() -> None:
    files = [file for file in (PACKAGE / "seams").glob("*.py") if "\nSEAM = " in file.read_text()]
    declared = [importlib.import_module(f"peagle_vllm.patches.{file.stem}").SEAM for file in files]
    assert {seam.name for seam in declared} == {seam.name for seam in all_seams()}
    assert {seam.name for seam in declared} == {file.stem.replace("_", "-") for file in files}


def test_the_ledger_and_doctor_import_no_vllm() -> None:
    code = (
        "import sys, peagle_tools.doctor.report, json\n"
        "from peagle_vllm.patches import all_seams, fingerprint, version\n"
        "assert all_seams()\n"
        "print(json.dumps([name for name in ('vllm', 'torch') if name in sys.modules]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == []


def test_a_seam_has_no_spaces_in_its_name() -> None:
    with pytest.raises(ValueError, match="hyphens"):
        Seam(name="head config", runner="V2", why="x", waits_for="x", delete_when="x")
