"""``peagle-vllm diagnose`` on the trained tiny pairs: planted faults are named, healthy heads get no cause."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peagle_tools.diagnose.engine import apply
from peagle_tools.diagnose.interventions import Setup, setup_of
from peagle_tools.shared.engines import Pair
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import read_target
from tests.conftest import ARM
from tests.heads.judging import AUX_KEY, Change, layer_setting, put, setting
from tests.support import engines
from tests.support.command import Result, only_line, run
from tests.support.dialects import read
from tests.support.models import EAGLE3, PEAGLE, PEAGLE_REDUCED, QWEN3, QWEN3_PEAGLE, TARGET, prompt_token_ids
from tests.support.recorder import record

pytestmark = pytest.mark.arm("plugin-v1")

LLAMA, REDUCED, QWEN = (TARGET, PEAGLE), (TARGET, PEAGLE_REDUCED), (QWEN3, QWEN3_PEAGLE)
LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 8.0}
# A pair; what names the fault, a cause or a line about the curve; and the fault.
FAULTS: dict[str, tuple[tuple[Path, Path], str, Change]] = {
    "aux layers one too low": (LLAMA, "cause: aux layers [2, 5, 7] for [1, 4, 6]", setting(**{AUX_KEY: [1, 4, 6]})),
    "aux layers one too high": (QWEN, "cause: aux layers [2, 5, 7] for [3, 6, 8]", setting(**{AUX_KEY: [3, 6, 8]})),
    "rope theta": (LLAMA, "cause: rope theta 10000.0", layer_setting(rope_parameters={"rope_theta": 100.0})),
    "rope scaling": (QWEN, "cause: rope scaling", layer_setting(rope_parameters=LINEAR)),
    "mask token": (LLAMA, "cause: mask token 6 (<|mask|>) for 300", setting(mask_token_id=300)),
    "mask_hidden rotated": (QWEN, "mask_hidden", put("mask_hidden", lambda tensor: tensor.roll(17))),
    "norm_before_residual": (LLAMA, "cause: norm_before_residual False", setting(norm_before_residual=True)),
}
HEALTHY = {f"{pair[1].name}, K={k}": (*pair, "-k", k) for pair in (LLAMA, REDUCED, QWEN) for k in range(3, 9)}
ENGINE = json.dumps({"dtype": "float32"})
QUICK = ("rope scaling", "tiny-qwen3-peagle, K=5")
FEWER = ("--num-prompts", 12, "--max-tokens", 48)  # a fifth of the rounds, for those in every run


def some(names: object) -> list:
    """QUICK ones in every run, all in the full one."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in names]


def diagnosed(target: Path, head: Path, *options: object) -> Result:
    engines.shut_down()
    with engines.no_collection():
        return run("diagnose", "--target", target, "--head", head, *options, "--engine", ENGINE, "--json")


def named_in(ran: Result) -> list[str]:
    """What it names, a line each, causes first."""
    data = json.loads(ran.stdout)
    causes = [f"cause: {data['cause']['change']}"] if data["cause"] else []
    return [*causes, *data["unusual"][-1:]]


@pytest.mark.parametrize("name", some(FAULTS))
def test_a_planted_fault_is_named(name: str, tmp_path: Path):
    """And no other cause."""
    ((target, folder), named, plant), fewer = FAULTS[name], FEWER if name in QUICK else ()
    head = read(folder)
    plant(head)
    lines = named_in(diagnosed(target, head.save(tmp_path / "head"), *fewer))
    assert any(named in line for line in lines), lines
    assert all(named in line for line in lines if line.startswith("cause")), lines


@pytest.mark.parametrize("name", some(HEALTHY))
def test_a_healthy_head_gets_no_cause(name: str, monkeypatch: pytest.MonkeyPatch):
    """What goes to the workers goes through vLLM's serialiser, as it does where the engine has a process of its own."""
    from vllm import LLM
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    call = LLM.collective_rpc
    monkeypatch.setattr(
        LLM, "collective_rpc", lambda llm, *args: call(llm, *MsgpackDecoder().decode(MsgpackEncoder().encode(args)))
    )
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    ran = diagnosed(*HEALTHY[name], *(FEWER if name in QUICK else ()))
    data = json.loads(ran.stdout)
    assert (ran.exit_code, named_in(ran)) == (0, [])
    assert data["drafts"] > 80 and len(data["trials"]) > 7
    progress = [line for line in ran.stderr.splitlines() if "changes left" in line]
    assert len(progress) == len(data["trials"])


def test_what_inspect_finds_needs_no_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Pair, "engine", lambda *_: pytest.fail("an engine started"))
    for head, line in ((EAGLE3, "is no P-EAGLE head"), (TARGET, "is a target")):
        ran = run("diagnose", "--target", TARGET, "--head", head)
        assert (ran.exit_code, ran.stdout) == (1, "")
        assert line in ran.stderr


def test_unreadable_input_is_one_line(tmp_path: Path):
    pair = ("--target", TARGET, "--head", PEAGLE)
    assert "cannot be read" in only_line(run("diagnose", *pair, "--prompts", tmp_path / "absent"))
    (tmp_path / "few.txt").write_text("one\ntwo\n")
    assert "few.txt: has 2 prompts, and" in only_line(run("diagnose", *pair, "--prompts", tmp_path / "few.txt"))
    assert "not a JSON object" in only_line(run("diagnose", *pair, "--engine", "[]"))
    assert "leave it out" in only_line(run("diagnose", *pair, "--engine", '{"speculative_config": {}}'))
    line = only_line(run("diagnose", *pair, "--engine", '{"no_such_argument": 1}'))
    assert "vLLM cannot run this pair" in line and "no_such_argument" in line
    assert line.endswith("; serve the target alone first, then with this head")


full_on_v2 = pytest.mark.full if ARM == "plugin-v2" else lambda test: test  # two minutes under the interpreter
CHANGES: dict[str, dict[str, Any]] = {
    "aux layers": {"aux_layers": (1, 4, 6)},
    "mask token": {"mask_token_id": 300},
    "norm_before_residual": {"norm_before_residual": True},
    "rope": {"rope": {"rope_theta": 100.0, "rope_type": "default"}},
}
MAX_TOKENS = 4 if ARM == "plugin-v2" else 16  # the interpreter takes a tenth of a second for a row


@pytest.mark.arm("plugin-v1", "plugin-v2")
@full_on_v2
def test_each_change_moves_the_drafts_and_is_undone():
    """Those that ``diagnose`` makes in a running engine."""
    live = engines.engine(engines.Settings(TARGET, PEAGLE))
    prompt = tuple(prompt_token_ids()[0][:24])

    def drafts(setup: Setup) -> list[tuple[int, ...]]:
        apply(live.worker, setup)
        with record(live) as noted:
            live.run([engines.Request("a", prompt, MAX_TOKENS)])
        return [row.draft for row in noted.rows]

    setup = setup_of(read_head(PEAGLE), read_target(str(TARGET)), live.settings.k)
    as_loaded = drafts(setup)
    for name, change in CHANGES.items():
        assert drafts(replace(setup, **change)) != as_loaded, name
        assert drafts(setup) == as_loaded, f"{name} was not undone"
