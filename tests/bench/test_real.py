"""A small sweep with a real server on loopback: one arm, one repeat, four requests in flight."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from peagle_tools.bench.cells import read_results
from peagle_tools.bench.metrics import AL
from peagle_tools.shared.acceptance import sum_of
from tests.support.models import prompt_token_ids
from tests.support.serving import ROOT, environment

PROMPTS, TOKENS = 8, 40


def test_a_sweep(tmp_path: Path) -> None:
    """Of tiny-cpu.yaml, with fewer and shorter answers."""
    suite = yaml.safe_load((ROOT / "benchmarks/suites/tiny-cpu.yaml").read_text())
    for dataset in suite["datasets"].values():
        dataset |= {"prompts": PROMPTS, "output_tokens": TOKENS}
    suite |= {"warmups": 2, "concurrency": [4]}
    suite["serve"]["environment"]["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # two processes a server and not three
    text = yaml.safe_dump(suite, sort_keys=False).replace("../../models", str(ROOT / "models"))
    file = tmp_path / "small.yaml"
    file.write_text(text)
    command = [sys.executable, "-m", "peagle_tools.cli", "bench", "run", str(file)]
    command += ["--results", str(tmp_path / "results"), "--arm", "P-EAGLE", "--k", "5", "--repeats", "1"]
    env = environment() | {"http_proxy": "http://127.0.0.1:9", "VLLM_API_KEY": "of another server"}  # are not for these
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = read_results(tmp_path / "results").cells
    assert (result.cell.arm, result.cell.k, result.cell.concurrency) == ("P-EAGLE", 5, 4)
    assert result.ok and result.raw["completed"] == PROMPTS

    # Every draft is counted. Those of warm-up requests are not: the server's counters are read after them.
    drafts = sum_of(list(result.repeated.values()))
    assert (drafts.num_drafts, drafts.length) == (result.raw["spec_decode_num_drafts"], pytest.approx(result.raw[AL]))
    assert drafts.shares == pytest.approx(result.raw["spec_decode_per_position_acceptance_rates"])
    assert len(result.repeated) > 1

    # The chat template frames a prompt with special tokens, so prompts grow by what it adds.
    assert result.raw["input_lens"] == [len(ids) for ids in prompt_token_ids()[:PROMPTS]]

    # No path of this machine is kept, but those that this test's suite names; shipped ones name relative ones.
    result.raw["model_id"] = None
    text = result.model_dump_json()
    assert str(Path.home()) not in text and str(ROOT) not in text
