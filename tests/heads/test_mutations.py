"""Every mutated head is refused by one line that names the fault, or is exactly what it was; and nothing else happens.

Through the commands, as a user would: inspect says it, convert refuses or writes the same weights.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from peagle_vllm.heads.head import read_head
from tests.heads import writers
from tests.heads.judging import meaning
from tests.heads.mutations import Mutation, mutations
from tests.heads.writers import DRAFT_VOCAB, MASK_TOKEN, Written
from tests.support.command import Result, run
from tests.support.random_heads import write_target

HEADS: dict[str, Callable[[], Written]] = {
    "speculators": lambda: writers.speculators(draft_vocab=DRAFT_VOCAB),
    "aws": writers.aws,
    "flat": writers.flat,
    "nemo-qwen3": lambda: writers.nemo("qwen3"),
    "specforge": lambda: writers.specforge(mask_token_id=MASK_TOKEN),
    "vllm": writers.vllm,
}
STEP = 7  # of the small run: every seventh mutation


def judge(head: Written, mutation: Mutation, place: Path, original: Path, target: Path) -> str:
    """ "refused" or "the same"; anything else is an AssertionError."""
    mutation.change(head)
    folder = head.save(place / "head")
    mutation.damage(folder)
    before = listing(place)

    inspected = run("inspect", "--json", folder, "--target", target)
    converted = run("convert", folder, place / "out", "--target", target)
    lines = refusals(inspected)
    if lines:
        assert converted.exit_code != 0 and not (place / "out").exists()
        assert listing(place) == before
        assert any(word in line for line in lines for word in mutation.words), lines
        return "refused"
    assert converted.exit_code == 0, converted.stderr
    assert meaning(folder) == meaning(original), "accepted in silence"
    assert {n: t.tolist() for n, t in weights(folder).items()} == {n: t.tolist() for n, t in weights(original).items()}
    assert listing(place) - before == {"out", "out/config.json", "out/model.safetensors"}
    return "the same"


def refusals(ran: Result) -> list[str]:
    assert "Traceback" not in ran.stderr + ran.stdout
    if ran.exit_code == 2:
        assert ran.stdout == ""
        lines = ran.stderr.splitlines()
        assert len(lines) == 1
        return lines
    assert ran.stderr == ""
    data = json.loads(ran.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not valid JSON"))
    lines = [problem["line"] for problem in data["problems"] if problem["severity"] == "error"]
    assert ran.exit_code == (1 if lines else 0)
    for line in lines:
        assert len(line.splitlines()) == 1 and len(line) < 1500
        line.encode()
    return lines


def weights(folder: Path) -> dict:
    """What the head computes with: not the map that a full vocabulary has no use for, and never ``t2d``."""
    head, lines = read_head(folder), {}
    for name, info in head.tensors.items():
        tensor = load_file(folder / info.file)[info.name].float()
        lines[name] = tensor.flatten() if name == "mask_hidden" else tensor
    unused = {"t2d", "d2t"} if head.draft_vocab_size == head.vocab_size else {"t2d"}
    return {name: tensor for name, tensor in lines.items() if name not in unused}


def listing(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


@pytest.mark.parametrize("step", [STEP, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", HEADS)
def test_mutations(name: str, step: int, tmp_path: Path):
    original, target = HEADS[name]().save(tmp_path / "original"), write_target(tmp_path / "target")
    seen: Counter[str] = Counter()
    for number, mutation in enumerate(list(mutations(HEADS[name]()))[::step]):
        try:
            seen[judge(HEADS[name](), mutation, tmp_path / str(number), original, target)] += 1
        except AssertionError as error:
            raise AssertionError(f"{name}: {mutation.name}: {error}") from error
    print(f"{name}: {dict(seen)}")
    assert seen["refused"] > 20 and seen["the same"] > 0
