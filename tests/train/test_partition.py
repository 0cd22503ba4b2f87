"""A step in parts is speculators' flat step: loss, metrics, and the gradient of every weight."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from speculators.losses import resolve_loss_config
from torch.utils._pytree import tree_leaves

from tests.support.operations import Operations
from tests.train.heads import CONFIGS, LOSS, Shape, batch, furthest, pair, step

LIMITS = {"fp32": (torch.float32, 1e-5), "fp64": (torch.float64, 1e-10)}
# Lengths of documents, supervised positions, padding.
SEQUENCES = {
    "single": ([23], range(3, 23), 0),
    "packed": ([9, 2, 12], [*range(2, 9), 10, *range(13, 17), *range(19, 23)], 0),
    "padded": ([11, 8], [*range(1, 11), *range(14, 19)], 5),
    "one-anchor": ([14], [8], 0),
    "no-anchor": ([7, 6], [], 2),
}
RATIOS = {"all": (1.0, 1.0), "cod": (0.7, 0.2)}
NORMS = ("", "fc_norm", "norm_before_fc")
GRID = product(SEQUENCES, (2, 4, 8), (1, 7, 999), RATIOS, LIMITS)
CASES = [
    (number, *case)
    for number, case in enumerate(GRID)
    if (case[2] == 7 or not case[0].endswith("-anchor")) and (case[1] == 8 or case[4] == "fp64")
]


@pytest.mark.parametrize(("seed", "sequence", "num_depths", "chunk_rows", "sampling", "dtype"), CASES)
def test_a_step_in_parts_is_the_flat_step(
    seed: int, sequence: str, num_depths: int, chunk_rows: int, sampling: str, dtype: str
) -> None:
    """Kinds of layers and norms take turns."""
    torch_dtype, limit = LIMITS[dtype]
    family = [*CONFIGS][seed // 4 % 2]
    documents, *positions = SEQUENCES[sequence]
    flat, parts = pair(Shape(family, NORMS[seed % len(NORMS)], torch_dtype))
    torch.manual_seed(seed)
    given = batch(documents, [*positions[0]], torch_dtype, positions[1])
    ratio, least = RATIOS[sampling]
    options = {"num_depths": num_depths, "down_sample_ratio": ratio, "down_sample_ratio_min": least}
    options["loss_config"] = LOSS
    wanted = step(flat, given, seed, **options)
    actual = step(parts, given, seed, chunk_rows=chunk_rows, **options)
    for part, flat_part in zip(actual, wanted, strict=True):
        assert furthest(part, flat_part) < limit


def test_loss_and_metrics_are_the_librarys() -> None:
    """Of its own losses, with and without gradients, with fewer anchors than there are."""
    flat, parts = pair(Shape("qwen3"))
    given = batch([40], [*range(4, 40)], torch.float32)
    losses = resolve_loss_config('{"kl_div": 0.5, "ce": 0.5}', "eager")
    options = {"num_depths": 5, "max_anchors": 20, "loss_config": losses}
    wanted, actual = step(flat, given, 3, **options), step(parts, given, 3, chunk_rows=16, **options)
    with torch.no_grad():
        torch.manual_seed(3)
        loss, metrics = parts(**given, **options, chunk_rows=16)[1:]
    for part, wanted_part in zip((*actual, {"loss": loss}, metrics), (*wanted, *wanted[:2]), strict=True):
        assert furthest(part, wanted_part) < 1e-5


def largest(tokens: int, num_depths: int) -> int:
    """The most numbers in a tensor that an operation returns."""
    given, sizes = batch([tokens], [*range(1, tokens)], torch.float32), set[int]()

    def note(_: Any, values: Any) -> None:
        sizes.update(leaf.numel() for leaf in tree_leaves(values[2]) if isinstance(leaf, torch.Tensor))

    with Operations(note, on=True):
        step(pair(Shape())[1], given, 0, num_depths=num_depths, chunk_rows=64, loss_config=LOSS)
    return max(sizes)


def test_no_tensor_grows_with_depths_or_with_the_square_of_tokens() -> None:
    assert largest(512, 8) < 1.1 * largest(512, 3)  # a chunk ends with its last anchor
    assert largest(1024, 3) < 2.1 * largest(512, 3)


def test_documents_of_like_sizes_attend_at_once() -> None:
    """Else launches bound a step on a GPU."""
    counts, all_rows = [], {"down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    for documents in ([8, 7], [8, 7] * 10):
        given = batch(documents, [i for i in range(sum(documents)) if i % 15 not in (0, 8)], torch.float32)
        with Operations(lambda op, _: re.match("aten::_scaled_dot_product(?!.*backward)", op.name()), on=True) as seen:
            step(pair(Shape())[1], given, 0, num_depths=4, chunk_rows=999, loss_config=LOSS, **all_rows)
        counts.append(seen.calls.total())
    assert counts[0] == counts[1] > 0


def test_checkpoints_are_the_librarys(tmp_path: Path) -> None:
    heads = pair(Shape())
    for name, head in zip(("flat", "parts"), heads, strict=True):
        head.save_pretrained(tmp_path / name)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "flat" / file).read_bytes()
    assert json.loads((tmp_path / "parts/config.json").read_text())["architectures"] == ["PEagleDraftModel"]
