"""Mutated heads: each is read and judged, or refused with ``HeadError``; never another exception."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle_vllm.heads.check_config import KINDS
from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.config import AUX_KEY
from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import Target
from tests.heads.mutations import paths
from tests.heads.writers import FOREIGN, SERVED, Written, eagle3

HEADS = SERVED | FOREIGN | {"eagle3": eagle3}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2, 3, 16, 48, 64, 2**31, 2**63, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "a\nb", "{}", "%s", "peagle", "llama", "PEagleDraftModel"]),
)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner))
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn]
FIELDS = [
    *("architectures", "dflash_config", "draft_vocab_size", AUX_KEY, "mask_token_id", "num_aux_hidden_states"),
    *("num_aux_layers", "pard_token", "ptd_token_id", "speculators_config", "speculators_model_type"),
    *("target_hidden_size", "transformer_layer_config", *KINDS),
]


def mutate_config(draw: st.DrawFn, config: dict[str, Any]) -> None:
    if draw(st.booleans()):
        config[draw(st.sampled_from(FIELDS))] = draw(JSON)
        return
    *parents, key = draw(st.sampled_from(list(paths(config))))
    node: Any = config
    for parent in parents:
        node = node[parent]
    if draw(st.booleans()):
        node[key] = draw(JSON)
    else:
        del node[key]


def mutate_tensors(draw: st.DrawFn, tensors: dict[str, torch.Tensor]) -> None:
    read = [name for name in ("mask_hidden", "d2t", "t2d", "fc.weight", "lm_head.weight") if name in tensors]
    name = draw(st.sampled_from(read) | st.sampled_from(sorted(tensors)))
    kind = draw(st.sampled_from(["drop", "rename", "shape", "dtype", "values"]))
    value = tensors.pop(name)
    if kind == "rename":
        tensors[draw(st.sampled_from(["d2t", "model." + name, "x\ny", "layers.", "layers.07.x"]))] = value
    elif kind == "shape":
        tensors[name] = torch.ones(draw(st.lists(st.integers(0, 70), max_size=3)), dtype=value.dtype)
    elif kind == "dtype":
        tensors[name] = value.to(draw(st.sampled_from(DTYPES)))
    elif kind == "values":
        filler = draw(st.sampled_from([0.0, float("nan"), float("inf"), -5.0, 400.0]))
        if not value.is_floating_point():
            filler = draw(st.sampled_from([0, 1]) if value.dtype == torch.bool else st.integers(-(2**63), 2**63 - 1))
        tensors[name] = torch.full_like(value, filler)


def mutate_files(draw: st.DrawFn, folder: Path) -> None:
    path = draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    at = draw(st.integers(0, min(len(content), 4000)) | st.integers(0, len(content)))
    kind = draw(st.sampled_from(["cut", "flip", "insert", "delete"]))
    if kind == "delete":
        path.unlink()
        return
    if kind == "cut":
        del content[at:]
    elif kind == "insert":
        content[at:at] = draw(st.binary(max_size=8))
    elif at < len(content):
        content[at] ^= draw(st.integers(1, 255))
    path.write_bytes(bytes(content))


@st.composite
def mutated(draw: st.DrawFn) -> Written:
    head = HEADS[draw(st.sampled_from(sorted(HEADS)))]()
    head.shards = draw(st.sampled_from([1, 1, 3]))
    for _ in range(draw(st.integers(0, 3))):
        mutate_config(draw, head.config)
    for _ in range(draw(st.integers(0, 2))):
        mutate_tensors(draw, head.tensors)
    if head.shards > 1 and draw(st.booleans()):
        head.index = {"weight_map": draw(JSON | st.dictionaries(st.sampled_from(sorted(head.tensors)), SCALARS))}
    return head


def judge(head: Written, data: st.DataObject) -> None:
    """Every outcome is allowed but an exception of another kind, a line of several lines, and a hang."""
    target = Target(
        "a\n{target}", data.draw(st.integers(1, 64)), data.draw(st.integers(1, 200)), data.draw(st.integers(1, 40))
    )
    k = data.draw(SCALARS)
    with tempfile.TemporaryDirectory() as name:
        folder = head.save(Path(name) / "head")
        if data.draw(st.integers(0, 2)) == 0:
            data.draw(st.composite(lambda draw: mutate_files(draw, folder))())
        try:
            read = read_head(folder)
            found = check_pair(read, target, num_speculative_tokens=k)
        except HeadError as error:
            lines = [str(error)]
        else:
            lines = [problem.line for problem in found]
    for line in lines:
        assert len(line.splitlines()) == 1
        assert len(line) < 1500
        line.encode()


SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=250, **SETTINGS)
@given(mutated(), st.data())
def test_mutated_heads(head: Written, data: st.DataObject):
    judge(head, data)


@pytest.mark.full
@settings(max_examples=3000, **SETTINGS)
@given(mutated(), st.data())
def test_mutated_heads_at_length(head: Written, data: st.DataObject):
    judge(head, data)
