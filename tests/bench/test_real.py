"""A small sweep with a real server on loopback: one arm, one repeat, four requests in flight."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from peagle_tools.bench.cells import CellResult, read_results
from peagle_tools.bench.metrics import metric
from peagle_tools.shared.acceptance import sum_of
from tests.support.models import prompt_token_ids
from tests.support.serving import environment

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, TOKENS = 8, 40


def small_suite(folder: Path) -> Path:
    """tiny-cpu.yaml with fewer and shorter answers."""
    suite = yaml.safe_load((ROOT / "benchmarks/suites/tiny-cpu.yaml").read_text())
    for dataset in suite["datasets"].values():
        dataset |= {"prompts": PROMPTS, "output_tokens": TOKENS}
    suite |= {"warmups": 2, "concurrency": [4]}
    suite["serve"]["environment"]["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # two processes a server and not three
    text = yaml.safe_dump(suite, sort_keys=False).replace("../../models", str(ROOT / "models"))
    file = folder / "small.yaml"
    file.write_text(text)
    return file


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished sweep, with results/ in it."""
    folder = tmp_path_factory.mktemp("sweep")
    command = [sys.executable, "-m", "peagle_tools.cli", "bench", "run", str(small_suite(folder))]
    command += ["--results", str(folder / "results"), "--arm", "P-EAGLE", "--k", "5", "--repeats", "1"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def result(sweep: Path) -> CellResult:
    """Of the only cell."""
    (only,) = read_results(sweep / "results")
    return only


def test_the_cell_is_whole(result: CellResult) -> None:
    assert (result.cell.arm, result.cell.k, result.cell.concurrency) == ("P-EAGLE", 5, 4)
    assert result.ok and result.raw["completed"] == PROMPTS
    assert metric(result, "acceptance_length") == pytest.approx(result.raw["spec_decode_acceptance_length"])


def test_every_draft_is_counted_by_place(result: CellResult) -> None:
    """Those of warm-up requests are not: the server's counters are read after them."""
    for counts in (result.places.context, result.places.output, result.places.repeated):
        assert sum_of(list(counts.values())) == result.drafts
    assert len(result.places.output) > 1 and len(result.places.repeated) > 1


def test_the_chat_template_was_applied(result: CellResult) -> None:
    """The template frames a prompt with special tokens, so prompts grow by what it adds."""
    assert result.raw["input_lens"] == [len(ids) for ids in prompt_token_ids()[:PROMPTS]]


def test_no_path_of_this_machine_is_kept(sweep: Path) -> None:
    for file in (sweep / "results/cells").iterdir():
        text = json.loads(file.read_text())
        text["configuration"] = None  # this test's suite names absolute paths; shipped ones name relative ones
        text["raw"]["model_id"] = None
        assert str(Path.home()) not in json.dumps(text) and str(ROOT) not in json.dumps(text)
