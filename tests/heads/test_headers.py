"""A safetensors file whose header lies is refused in one line; what is accepted is a head of the same structure."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peagle_vllm.heads.checks import check
from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import read_head
from tests.heads import writers
from tests.heads.headers import KINDS, join, split
from tests.heads.writers import DRAFT_VOCAB, TARGET, Written

HEADS: dict[str, Callable[[], Written]] = {
    "speculators": lambda: writers.speculators(draft_vocab=DRAFT_VOCAB),
    "aws": writers.aws,
    "nemo-qwen3": lambda: writers.nemo("qwen3"),
}
FILE = "model.safetensors"


def structure(folder: Path) -> dict[str, tuple]:
    """Names, shapes and kinds of numbers, as another reader sees them. ``mask_hidden`` may have any shape."""
    tensors = load_file(folder / FILE)
    return {
        name: (tensor.numel() if name.endswith("mask_hidden") else tensor.shape, tensor.is_floating_point())
        for name, tensor in tensors.items()
        if name != "t2d"  # vLLM does not read it
    }


def judge(folder: Path, expected: dict[str, tuple]) -> str:
    """ "refused" or "accepted", which only a head of the same structure may be."""
    try:
        lines = [p.line for p in check(read_head(folder), TARGET, numbers=True) if p.severity == "error"]
    except HeadError as error:
        lines = [str(error)]
    for line in lines:
        assert len(line.splitlines()) == 1 and len(line) < 1500
        assert str(folder) in line, "the line names no file"
        line.encode()
    assert lines or structure(folder) == expected, "accepted in silence"
    return "refused" if lines else "accepted"


def sweep(tmp_path: Path, count: int) -> dict[str, Counter[str]]:
    seen = {kind: Counter[str]() for kind in KINDS}
    originals = {name: make().save(tmp_path / name) for name, make in HEADS.items()}
    sound = {name: ((folder / FILE).read_bytes(), structure(folder)) for name, folder in originals.items()}
    for seed in range(count):
        rng = random.Random(seed)
        name, kind = rng.choice(list(HEADS)), list(KINDS)[seed % len(KINDS)]
        raw, expected = sound[name]
        (originals[name] / FILE).write_bytes(KINDS[kind](raw, rng))
        try:
            seen[kind][judge(originals[name], expected)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {name}, {kind}: {error}") from error
    print(*(f"{kind}: {dict(counts)}" for kind, counts in seen.items()), sep="\n")
    return seen


# Some faults leave what a header says as it was: a space more, a field that nobody reads, a name in t2d's place.
TOLERANT = ("bytes", "shape", "dtype", "entry", "names", "metadata", "offsets")


def expect(seen: dict[str, Counter[str]]) -> None:
    for kind, counts in seen.items():
        assert counts["refused"] > 0.6 * counts.total(), kind
        assert kind in TOLERANT or not counts["accepted"], kind


def test_lying_headers(tmp_path: Path):
    expect(sweep(tmp_path, 1300))


@pytest.mark.full
def test_ten_thousand_lying_headers(tmp_path: Path):
    expect(sweep(tmp_path, 13_000))


def test_a_file_put_together_again_is_the_same_head(tmp_path: Path):
    """Else every mutation would be refused for how it was written."""
    folder = writers.aws().save(tmp_path / "head")
    expected = structure(folder)
    (folder / FILE).write_bytes(join(*split((folder / FILE).read_bytes())))
    assert judge(folder, expected) == "accepted"


def test_a_name_that_stands_there_twice(tmp_path: Path):
    """safetensors itself takes the last one: another shape of as many numbers."""
    folder = writers.speculators().save(tmp_path / "head")
    pairs, data = split((folder / FILE).read_bytes())
    (name, entry) = next(pair for pair in pairs if pair[0] == "fc.weight")
    (folder / FILE).write_bytes(join([(name, entry | {"shape": entry["shape"][::-1]}), *pairs], data))
    assert torch.equal(load_file(folder / FILE)["fc.weight"], torch.ones(16, 48))
    with pytest.raises(HeadError, match=r"names something twice\): |\(its header names something twice"):
        read_head(folder)
