"""``tune``: the suite that it writes, the config and the gain in the end, and bad input."""

import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from peagle_tools.bench.suite import Suite
from peagle_tools.shared.checked_yaml import read_yaml
from tests.support.command import only_line, run
from tests.support.models import EAGLE3, PEAGLE, TARGET

PAIR = (TARGET, PEAGLE)
SWEEP = "bench-results/tune-tiny-llama-peagle"


@pytest.fixture
def prompts(elsewhere: Path) -> Path:
    file = elsewhere / "mine.txt"
    file.write_text('What is a hash table?\n{"prompt": "Why?\\nSay it."}\n')
    return file


def test_tune_ends_with_a_config_and_the_measured_gain(prompts: Path, elsewhere: Path) -> None:
    command = ("tune", *PAIR, "--prompts", "mine.txt", "--k", 3, "--k", 7)
    ran = run(*command)
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert "prompts of mine.txt; 18 cells of at least 2 requests" in ran.stdout
    flag, config = shlex.split(ran.stdout.splitlines()[-1])
    pasted = json.loads(config)
    assert flag == "--speculative-config" and pasted.pop("num_speculative_tokens") in (3, 7)
    pasted.pop("num_speculative_tokens_per_batch_size", None)
    assert pasted == {"method": "eagle3", "model": str(PEAGLE), "parallel_drafting": True}

    for file in Path(SWEEP, "cells").glob("p-eagle*"):
        cell = json.loads(file.read_text())
        cell["raw"]["output_throughput"] /= 9
        file.write_text(json.dumps(cell))
    ran = run(*command)
    assert ran.stdout.splitlines()[-1] == "No depth gains more than the noise: leave --speculative-config out."
    assert ran.stdout.count("no speculation; the fastest depth is K=") == 2
    assert (elsewhere / "log").read_text().count("measured") == 18, "a cell was measured again"
    prompts.write_text("Another one, and a third.\nYes.\n")
    assert "was begun with other prompts (prompts); name another" in run(*command).stderr
    (elsewhere / SWEEP / "sweep.json").unlink()  # a suite without results is somebody's, too
    assert "holds a suite or results of other options" in only_line(run(*command[:-2]))


def test_the_suite(prompts: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "head").symlink_to(PEAGLE)
    monkeypatch.setenv("STANDIN", "no-start")
    options = ("--prompts", prompts, "--serve", "--dtype float32", "--results", "mine")
    run("tune", TARGET, "head", *options)
    suite = read_yaml(elsewhere / "mine/suite.yaml", Suite, "suite")
    assert suite.serve.flags == "--dtype float32" and (suite.concurrency, suite.repeats) == ([1, 8], 3)
    assert suite.datasets["prompts"].jsonl == str(prompts) and suite.datasets["prompts"].prompts == 2
    assert [arm.k for arm in suite.arms.values()] == [[], [3, 5, 7]]
    assert suite.arms["P-EAGLE"].speculative_config["model"] == str(elsewhere / "head")


def test_without_prompts_it_says_which_it_takes(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN", "no-start")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # the stand-in needs no `datasets`
    ran = run("tune", *PAIR, "--concurrency", 4)
    assert "no --prompts, so MT-Bench from the hub" in ran.stdout and "the head is 64 wide" in ran.stdout
    assert ran.exit_code == 2 and "speculative-config" not in ran.stdout
    suite = read_yaml(elsewhere / SWEEP / "suite.yaml", Suite, "suite")
    assert suite.datasets["prompts"].hub == "mt-bench" and suite.concurrency == [4]


def test_bad_input_is_one_line(prompts: Path, elsewhere: Path) -> None:
    def line(*command: object) -> str:
        return only_line(run("tune", *command, "--prompts", prompts))

    assert "--serve: No closing quotation" in line(*PAIR, "--serve", "--dtype 'x")
    assert "nowhere is not a folder" in line("nowhere", PEAGLE)
    assert "nowhere cannot be read (No such file or" in only_line(run("tune", *PAIR, "--prompts", "nowhere"))
    ran = run("tune", TARGET, EAGLE3, "--prompts", prompts)
    assert ran.exit_code == 1 and ran.stderr.startswith("error: ") and len(ran.stderr.splitlines()) == 1
    assert not list(elsewhere.glob("bench-results/*/*"))  # else the corrected command would be refused
