"""The ledger names everything of vLLM that our code relies on, and nothing that is not there."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import peagle_vllm
from peagle_vllm.seams import all_seams
from peagle_vllm.seams.fingerprint import load_recorded
from peagle_vllm.seams.ledger import Seam, Touch
from peagle_vllm.seams.render import render
from peagle_vllm.seams.source import Source
from peagle_vllm.seams.version import VllmInstall
from tests.seams.trees import installed, next_release
from tests.seams.uses import Use, attributes_named, attributes_read, imported_uses, uses_of_bases

PACKAGE = Path(peagle_vllm.__file__).parent
REPOSITORY = Path(__file__).parents[2]

# What vLLM documents, or cannot take away without every plugin noticing.
PUBLIC = {("vllm.config.vllm", "VllmConfig"), ("vllm.logger", "init_logger")}

OURS = [
    ("v1/proposer.py", "ParallelEagleProposer"),
    ("v2/speculator.py", "ParallelEagleSpeculator"),
    ("v2/cudagraph.py", "DraftCudaGraphManager"),
]
RELEASES = pytest.mark.parametrize("release", [installed, next_release], ids=["installed", "next"])


def ledger() -> list[Touch]:
    return [touch for seam in all_seams() for touch in seam.touches]


def covered(use: Use) -> bool:
    """Whether the ledger names what is used, or the whole of the class around it."""
    named = {(touch.module, touch.qualname) for touch in ledger()}
    whole = {(touch.module, touch.qualname) for touch in ledger() if touch.what == "body"}

    def holds(module: str, qualname: str) -> bool:
        return (module, qualname) in named | PUBLIC or (module, qualname.rpartition(".")[0]) in whole

    return any(all(holds(*touch) for touch in way) for way in use.ways)


@RELEASES
@pytest.mark.parametrize(("file", "name"), OURS)
def test_what_our_classes_inherit_override_and_call_is_in_the_ledger(
    file: str, name: str, release: Callable[[], VllmInstall]
) -> None:
    uses = uses_of_bases(Source(release().root), PACKAGE / file, name)
    assert len(uses) >= 5
    missing = [f"{name}: {use.name} ({[sorted(way) for way in use.ways]})" for use in uses if not covered(use)]
    assert not missing, "\n".join(missing)


@RELEASES
def test_what_our_code_imports_from_vllm_is_in_the_ledger(release: Callable[[], VllmInstall]) -> None:
    """All but the tools that run vLLM as its users do: a refusal to serve must not hang on that."""
    source = Source(release().root)
    tools = {PACKAGE / tool for tool in TOOLS}
    files = [file for file in PACKAGE.rglob("*.py") if not tools & {file, *file.parents}]
    uses = {use: file for file in files for use in imported_uses(source, file)}
    assert len(uses) > 10
    missing = [f"{file.relative_to(PACKAGE)}: {use.name}" for use, file in uses.items() if not covered(use)]
    assert not missing, "\n".join(missing)


# Attributes that are read by name and are none of vLLM's.
OTHERS = {
    "draft_stats",  # ours
    "drafts_up_to_max_model_len",  # ours
    "inc",  # of Prometheus's counters
    "labels",
    "mask_hidden",  # a buffer that the heads register in __init__, which is in the ledger whole
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
def test_every_attribute_that_is_read_of_vllms_objects_is_in_the_ledger(release: Callable[[], VllmInstall]) -> None:
    """Whatever object it is read of, so only names are compared."""
    rooms = [file for room in ("core", "v1", "v2") for file in (PACKAGE / room).glob("*.py")]
    seams = [file for file in (PACKAGE / "seams").glob("*.py") if "\nSEAM = " in file.read_text()]
    named = attributes_named(Source(release().root), ledger())
    read = {file: attributes_read(file, {name for _, name in OURS}) for file in (*rooms, *seams)}
    assert sum(map(len, read.values())) > 60
    missing = {file.relative_to(PACKAGE): sorted(names - named - OTHERS) for file, names in read.items()}
    assert not any(missing.values()), {str(file): names for file, names in missing.items() if names}


TOOLS = {
    "diagnose": {"vllm"},
    # `vllm bench serve` itself, which vLLM's CPU build has no command for.
    "bench": {"vllm.benchmarks.serve", "vllm.utils.argparse_utils"},
    "plan": set(),
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
    rooms = ("core", "heads", "seams", "v1", "v2")
    for file in (file for room in rooms for file in (PACKAGE / room).glob("*.py")):
        for tool in (*TOOLS, "commands", "doctor", "cli"):
            assert f"peagle_vllm.{tool.removesuffix('.py')}" not in file.read_text(), (
                f"{file.relative_to(PACKAGE)} imports {tool}"
            )


def test_every_declared_seam_is_installed_by_a_hook() -> None:
    files = [file for file in (PACKAGE / "seams").glob("*.py") if "\nSEAM = " in file.read_text()]
    declared = {importlib.import_module(f"peagle_vllm.seams.{file.stem}").SEAM for file in files}
    assert declared == set(all_seams())
    assert {seam.name for seam in declared} == {file.stem.replace("_", "-") for file in files}


def test_what_a_seam_wraps_is_declared_in_its_own_file() -> None:
    wrapped = 0
    for file in sorted((PACKAGE / "seams").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "wrap"):
                continue
            name = ast.literal_eval(node.args[1])
            seam = importlib.import_module(f"peagle_vllm.seams.{file.stem}").SEAM
            declared = {touch.qualname.rpartition(".")[2] for touch in seam.touches if touch.how == "wrapped"}
            assert name in declared, f"{file.name} wraps {name}, which its SEAM does not say"
            wrapped += 1
    assert wrapped >= 5


def test_every_touch_is_in_some_recorded_version() -> None:
    everywhere = [digests for trees in load_recorded().values() for digests in trees.values()]
    nowhere = [touch.path for touch in ledger() if all(digests[touch.key] is None for digests in everywhere)]
    assert not nowhere


def test_every_recorded_tree_has_the_whole_ledger() -> None:
    keys = {touch.key for touch in ledger()}
    for trees in load_recorded().values():
        for label, digests in trees.items():
            assert set(digests) == keys, f"record {label} again: python -m peagle_vllm.seams.record"


def test_the_page_is_what_the_ledger_renders() -> None:
    page = (REPOSITORY / "docs" / "seams.md").read_text()
    assert page == render(all_seams(), load_recorded()), "run `python -m peagle_vllm.seams.render > docs/seams.md`"


def test_the_ledger_and_doctor_import_no_vllm() -> None:
    code = (
        "import sys, peagle_vllm.doctor\n"
        "from peagle_vllm.seams import all_seams, fingerprint, version\n"
        "assert all_seams()\n"
        "print([name for name in ('vllm', 'torch') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_seam_without_touches_or_with_one_twice_or_with_spaces_in_its_name_is_no_seam() -> None:
    touch = Touch("vllm.config.vllm", "VllmConfig", "called")
    texts = {"name": "x", "runner": "V2", "why": "x", "waits_for": "x", "delete_when": "x"}
    with pytest.raises(ValueError, match="touches nothing"):
        Seam(**texts, touches=())
    with pytest.raises(ValueError, match="twice"):
        Seam(**texts, touches=(touch, touch))
    with pytest.raises(ValueError, match="hyphens"):
        Seam(**texts | {"name": "head config"}, touches=(touch,))
