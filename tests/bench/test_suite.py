"""Suites: a mistake is named with its line and key, the shipped ones say what was published; ``tune`` writes one."""

import importlib.util
import json
import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import vllm.envs
from transformers import AutoTokenizer

from peagle_tools.bench import client
from peagle_tools.bench.cells import grid
from peagle_tools.bench.suite import Flags, Suite
from peagle_tools.shared.checked_yaml import read_yaml
from peagle_tools.shared.errors import ToolError
from tests.support.command import only_line, run
from tests.support.models import EAGLE3, PEAGLE, TARGET

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "benchmarks/suites").glob("*.yaml"))

MISTAKES = {
    "unknown key": ("warmups: 0", "warmup: 0", 18, "warmup: unknown key"),
    "wrong type": ("repeats: 2", "repeats: two", 17, "repeats: Input should be a valid integer"),
    "missing": ("    output_tokens: 64\n", "", 12, "datasets.prompts.output_tokens: is missing"),
    "key twice": ("repeats: 2", "repeats: 2\nname: other", 18, "name: is there twice"),
    "no key": ("repeats: 2", "? [repeats]\n: 2", 17, "found unhashable key"),
    "no k": ("    k: [3, 7]\n  P-", "  P-", 5, "arms.EAGLE-3: a speculative_config needs k"),
    "two sources": ("    prompts: 12", "    hub: gsm8k\n    prompts: 12", 12, "datasets.prompts: give exactly one of"),
    "no folder": ("./eagle}", "./eagel}", 6, "arms.EAGLE-3.speculative_config: there is no folder ./eagel"),
    "not quoted": ("none: {}", "none: {environment: {A: 1}}", 4, "arms.none.environment.A: is 1; write it in quotes"),
    "counters": ("none: {}", 'none: {flags: "--disable-log-stats"}', 4, "arms.none.flags: --disable-log-stats turns"),
    "our flag": ("none: {}", 'none: {flags: "--spec_method=x"}', 4, "arms.none.flags: --spec-method does not belong"),
    "config file": ("none: {}", "none: {flags: --config=a.yaml}", 4, "arms.none.flags: --config could make the arm"),
    "secret": ("none: {}", "none: {environment: {HF_TOKEN: a}}", 4, "arms.none.environment: HF_TOKEN would be written"),
    "no YAML": ("none: {}", "none: {", 6, "no YAML"),
    "same files": ("none: {}", "none: {}\n  None: {}", 1, "suite: two of none, None, EAGLE-3"),
    "bad name": ("name: trial", "name: A trial", 1, "name: String should match pattern"),
}


@pytest.mark.parametrize(("old", "new", "line", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_line_and_key(suite_file: Path, old: str, new: str, line: int, message: str) -> None:
    text = suite_file.read_text()
    assert old in text
    suite_file.write_text(text.replace(old, new))
    with pytest.raises(ToolError) as error:
        read_yaml(suite_file, Suite, "suite")
    first = str(error.value).splitlines()[0]
    assert first.startswith(f"{suite_file}:{line}: {message}")


def test_parts_are_chosen(suite: Suite) -> None:
    assert len({cell.id for cell in grid(suite)}) == 20
    assert grid(suite.model_copy(update={"concurrency": [1, 4, 1]})) == grid(suite)
    cells = grid(suite, k=[7], concurrency=[4], repeats=1)
    assert [(c.arm, c.k, c.concurrency) for c in cells] == [("none", 0, 4), ("EAGLE-3", 7, 4), ("P-EAGLE", 7, 4)]
    assert not grid(suite, arms=["none"], concurrency=[16])


def test_the_client_reads_the_servers_tokenizer(suite: Suite) -> None:
    trusting = suite.model_copy(update={"serve": Flags(flags="--trust-remote-code")})
    cell, word = grid(suite)[0], "--trust-remote-code"
    assert word in client.bench_arguments(trusting, cell) and word not in client.bench_arguments(suite, cell)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_suites(file: Path) -> None:
    suite = read_yaml(file, Suite, "suite")
    assert suite.name == file.stem and {"none", "EAGLE-3", "P-EAGLE"} <= suite.arms.keys()
    given = dict(re.findall(r"--(\S+) (\d+)", suite.serve.flags))
    for arm in suite.arms.values():
        variables = suite.serve.environment | arm.environment
        assert {name for name in variables if name.startswith("VLLM_")} <= vllm.envs.environment_variables.keys()
        is_peagle = (arm.speculative_config or {}).get("parallel_drafting")
        if is_peagle and "--no-enable-chunked-prefill" in suite.serve.flags:
            assert int(given["max-num-batched-tokens"]) - int(given["max-model-len"]) >= max(arm.k) - 2, "is refused"


def test_a_depth_that_no_arm_has(suite_file: Path) -> None:
    line = only_line(run("bench", "run", suite_file, "--k", 7, "--k", 9))
    assert "has no such arm with K=9; it has [0, 3, 7]" in line
    assert "has no concurrency 9; it has [1, 4]" in only_line(run("bench", "run", suite_file, "--concurrency", 9))


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = only_line(run("bench", "run", "x"))
    assert line == 'peagle-vllm: pydantic is not installed: pip install "peagle-vllm[bench]"'


def test_conversations_are_sent_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the target's template, as vLLM's data set puts single prompts in it; raw where it has none."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}) + '\n{"prompt": "What?"}\n{"prompt": "?"}\n')
    args, out = Namespace(prompts=str(tmp_path / "a.jsonl"), model=str(TARGET)), tmp_path / "out.jsonl"
    args.trust_remote_code, args.num_prompts = False, 2
    client.write_prompts(args, out)
    assert (args.dataset_name, args.dataset_path, args.skip_chat_template) == ("custom", str(out), True)
    sent = [json.loads(line)["prompt"] for line in out.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    template = tokenizer.apply_chat_template
    chats = (chat, [{"role": "user", "content": "What?"}])
    assert sent == [template(turns, add_generation_prompt=True, tokenize=False) for turns in chats]
    tokenizer.chat_template = None
    monkeypatch.setattr(client, "read_tokenizer", lambda *_, **__: tokenizer)
    client.write_prompts(args, out)
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["Be brief.\nWhy?", "What?"]


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
    suite, sweep = elsewhere / SWEEP / "suite.yaml", elsewhere / SWEEP / "sweep.json"
    for gone, left in ((suite, sweep), (sweep, suite)):  # one alone is somebody's, too
        text = gone.read_text()
        gone.unlink()
        assert "holds a suite or results of other options" in only_line(run(*command[:-2]))
        assert left.exists() and not gone.exists()
        gone.write_text(text)


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
    assert f"{PEAGLE} is a head, not a target; name the served model" in line(PEAGLE, TARGET)
    assert "nowhere cannot be read (No such file or" in only_line(run("tune", *PAIR, "--prompts", "nowhere"))
    ran = run("tune", TARGET, EAGLE3, "--prompts", prompts)
    assert ran.exit_code == 1 and ran.stderr.startswith("error: ") and len(ran.stderr.splitlines()) == 1
    assert not list(elsewhere.glob("bench-results/*/*"))  # else the corrected command would be refused
