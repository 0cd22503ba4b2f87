"""Mutated heads given to an engine: refused by one line that names the fault, or served exactly as before."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.drafts.dialects import CASES, Case, write_dialect, write_own
from tests.drafts.grid import MAX_MODEL_LEN, requests
from tests.heads.mutations import Mutation, mutations
from tests.heads.test_mutations import refusals
from tests.heads.writers import Written
from tests.inspect.running import run
from tests.support import random_heads as tiny_heads
from tests.support.engines import Settings, engine
from tests.support.recorder import record

pytestmark = pytest.mark.arm("plugin-v1")

DIALECTS = ("speculators", "aws", "nemo-qwen3")
SMALL, LARGE = 15, 90  # mutations of all dialects together
# Engines of a head with these start, and end with the check of the loaded weights: the dear ones, so few of them.
LOADED = ("with NaN", "with Inf", "with -Inf")


def chosen(head: Written, count: int, seed: int) -> list[Mutation]:
    """A spread of mutations, half of them of tensors and files."""
    every = list(mutations(head))
    fields = [m for m in every if " = " in m.name or ("deleted" in m.name and "." in m.name)]
    others = [m for m in every if m not in fields]
    return [
        part[(seed + i * len(part) // (count // 2)) % len(part)] for part in (fields, others) for i in range(count // 2)
    ]


class Heads:
    """Heads of the dialects, and what each drafts."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.target = tiny_heads.write_target(folder / "target")
        self.known: dict[str, tuple[Callable[[], Written], dict]] = {}

    def __call__(self, name: str) -> tuple[Callable[[], Written], dict]:
        if name not in self.known:
            case: Case = CASES[name]
            own = write_own(self.folder / f"{name}-own", self.target, case)
            head = write_dialect(self.folder / name, own, case)
            self.known[name] = (lambda: read_written(head)), self.drafts(head)
        return self.known[name]

    def drafts(self, head: Path) -> dict[tuple[str, int], tuple[int, ...]]:
        live = engine(Settings(self.target, head, k=5, max_model_len=MAX_MODEL_LEN))
        with record(live) as noted:
            live.run(requests(4, 12, seed=0))
        return {(row.req, row.p_last): row.draft for row in noted.rows}


def read_written(folder: Path) -> Written:
    return Written(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(tmp_path_factory.mktemp("mutated"))


def sweep(heads: Heads, count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    seen = {"refused": 0, "the same": 0}
    for name in DIALECTS:
        make, expected = heads(name)
        for mutation in chosen(make(), count // len(DIALECTS), seed):
            place = heads.folder / f"{name}-{seed}-{sum(seen.values())}"
            verdict = judge(heads, make(), mutation, place, expected, monkeypatch)
            print(f"{name}: {mutation.name}: {verdict}")
            seen[verdict] += 1
    return seen


def judge(heads: Heads, head: Written, mutation: Mutation, place: Path, expected: dict, monkeypatch) -> str:
    from peagle_vllm.serving import RefusedError

    mutation.change(head)
    folder = head.save(place / "head")
    mutation.damage(folder)
    lines = refusals(run(monkeypatch, "inspect", "--json", folder, "--target", heads.target))
    if not lines:
        assert heads.drafts(folder) == expected, f"{mutation.name}: accepted in silence"
        return "the same"
    with pytest.raises(RefusedError) as refused:
        engine(Settings(heads.target, folder, k=5, max_model_len=MAX_MODEL_LEN))
    line = str(refused.value)
    assert line.startswith("P-EAGLE refused: ") and len(line.splitlines()) == 1
    if mutation.name.endswith(LOADED):
        assert "NaN or Inf" in line
    else:
        assert line.removeprefix("P-EAGLE refused: ") in "\n".join(lines), f"inspect says {lines}"
    return "refused"


def test_some_mutated_heads(heads: Heads, monkeypatch: pytest.MonkeyPatch):
    assert sum(sweep(heads, SMALL, 3, monkeypatch).values()) >= 12


@pytest.mark.full
def test_many_mutated_heads(heads: Heads, monkeypatch: pytest.MonkeyPatch):
    seen = sweep(heads, LARGE, 1, monkeypatch)
    print(seen)
    assert sum(seen.values()) >= 30 and min(seen.values()) >= 5
