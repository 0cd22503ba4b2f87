"""What ``inspect`` says of a head's config is what the server does with it, whatever stands in its fields."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle_vllm.heads.checks import check
from peagle_vllm.heads.fields import QUANTIZATION
from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import Target, read_target
from peagle_vllm.serving import RefusedError
from tests.drafts import config_fields
from tests.drafts.config_fields import MISSING, ROPES, Case
from tests.drafts.dialects import read
from tests.support import random_heads as tiny_heads
from tests.support.engines import Engine, Settings, engine
from tests.support.loading import load

pytestmark = pytest.mark.arm("plugin-v1")

LAYOUTS = [(family, fmt) for family in ("llama", "qwen3") for fmt in ("vllm", "speculators")]
# What vLLM by itself serves otherwise: a bias that no file holds, and attention to tokens that come later.
MISREAD = {"bias", "is_causal", "rope_parameters.mrope_section", "rope_parameters.is_deepseek_v4"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    logging.disable(logging.CRITICAL)
    yield engine(Settings(tiny_heads.write_target(tmp_path_factory.mktemp("fields") / "target")))
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def names(live: Engine, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    read: set[str] = set()
    for family, fmt in LAYOUTS:
        spec = tiny_heads.HeadSpec(family=family, fmt=fmt)
        head = tiny_heads.write_head(tmp_path_factory.mktemp("recorded") / "head", live.settings.target, spec)
        with config_fields.recording(read):
            load(live, head, stock=True)
    return read | config_fields.named_in_source() | config_fields.checked_by_transformers()


def inspected(head: Path, target: Target) -> list[str]:
    """What is unfit, by ``inspect``."""
    try:
        return [problem.line for problem in check(read_head(head), target) if problem.severity == "error"]
    except HeadError as error:
        return [str(error)]


def written(plain: Path, case: Case) -> Path:
    head = read(plain)
    case.apply(head)
    return head.save(plain.parent / "head")


def judge(live: Engine, plain: Path, case: Case, target: Target, base: torch.Tensor) -> str:
    """ "served" or "refused"; anything else is an AssertionError."""
    head = written(plain, case)
    lines = inspected(head, target)
    if lines:
        with pytest.raises(RefusedError) as refused:
            load(live, head)
        assert str(refused.value) == f"P-EAGLE refused: {lines[0]}"
        assert len(lines[0].splitlines()) == 1 and len(lines[0]) < 600
        return "refused"
    logits = load(live, head)
    try:
        right = base if case.field in MISREAD else load(live, head, stock=True)
    except Exception:  # vLLM by itself does not take what means nothing
        right = base
        if case.label == "null":  # is as good as absent
            right = load(live, written(plain, replace(case, value=MISSING)))
    assert torch.equal(logits, right), "served with another meaning"
    return "served"


@pytest.mark.parametrize("step", [3 * len(LAYOUTS), pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_verdicts(layout: tuple[str, str], step: int, live: Engine, names: set[str], tmp_path: Path):
    """Each third value in one of the layouts; in the full run each in each. ``-s`` prints the verdicts."""
    spec = tiny_heads.HeadSpec(family=layout[0], fmt=layout[1])
    plain = tiny_heads.write_head(tmp_path / "own", live.settings.target, spec)
    target, bases = read_target(str(live.settings.target)), {"": load(live, plain)}
    for rope, content in ROPES.items():
        head = read(plain)
        head.layer_config["rope_parameters"] = content
        bases[rope] = load(live, head.save(tmp_path / "head"))
    table, wrong, seen = defaultdict(list), [], Counter[str]()
    for case in list(config_fields.cases(names, read(plain)))[LAYOUTS.index(layout) % step :: step]:
        try:
            verdict = judge(live, plain, case, target, bases[case.rope])
        except (Exception, pytest.fail.Exception) as error:
            verdict = "DIFFER"
            wrong.append(f"{case}: {type(error).__name__}: {error}"[:400])
        seen[verdict] += 1
        table[verdict, f"{case.field}{f' ({case.rope})' if case.rope else ''}"].append(case.label)
    print(f"\n{'-'.join(layout)}: {dict(seen)}")
    for (verdict, field), labels in sorted(table.items(), key=lambda row: row[0][1]):
        print(f"  {field:48} {verdict:8} {', '.join(labels)}")
    assert not wrong, "\n".join(wrong)
    assert seen["served"] > 15 and seen["refused"] > 15


BY_TYPE = {"full_attention": ROPES["default"], "sliding_attention": ROPES["default"] | {"rope_theta": 1e6}}
SERVED: dict[str, dict[str, Any]] = {
    "a rope by layer type": {"rope_parameters": BY_TYPE},
    "another name of the activation": {"hidden_act": None, "hidden_activation": "silu"},
    "what a target's config has": {
        **{"num_experts": 8, "text_config": {"hidden_size": 1}, "vision_config": 3, "is_encoder_decoder": True},
        **{"model_max_length": 8, "n_predict": 3, "bos_token_id": "1", "dtype": "half precision", "use_cache": "x"},
        **{"attention_dropout": "0.0", "tie_word_embeddings": True, "sliding_window": 0, "bias": True},
    },
    "old spellings": {"rope_scaling": {"type": "default", "factor": None}, "rotary_pct": 1.0, "hidden_act": "swish"},
}
REFUSED: dict[str, dict[str, Any]] = {
    'hidden_act is "gelu_pytorch_tanh", needs': {"hidden_act": "gelu_pytorch_tanh"},
    'hidden_act is "gelu", needs': {"hidden_act": None, "hidden_activation": "gelu"},
    "rope_parameters holds one for each of": {"rope_parameters": {"sliding_attention": ROPES["default"]}},
    'max_position_embeddings is "4096", needs': {"max_position_embeddings": "4096"},
}


def with_fields(plain: Path, fields: dict[str, Any]) -> Path:
    """A copy of a head whose layers' config has these fields; without those that are None."""
    head = read(plain)
    for key, value in fields.items():
        head.layer_config.pop(key, None)
        head.layer_config.update({} if value is None else {key: value})
    return head.save(plain.parent / "head")


@pytest.mark.parametrize("fmt", ["vllm", "speculators"])
def test_what_several_fields_say(fmt: str, live: Engine, tmp_path: Path):
    plain = tiny_heads.write_head(tmp_path / "own", live.settings.target, tiny_heads.HeadSpec(fmt=fmt))
    target, logits = read_target(str(live.settings.target)), load(live, plain)
    for name, fields in SERVED.items():
        head = with_fields(plain, fields)
        assert not inspected(head, target), name
        assert torch.equal(load(live, head), logits), name
    for beginning, fields in REFUSED.items():
        head = with_fields(plain, fields)
        (line,) = inspected(head, target)
        assert line.startswith(beginning)
        with pytest.raises(RefusedError) as refused:
            load(live, head)
        assert str(refused.value) == f"P-EAGLE refused: {line}"


def test_quantization_methods():
    """vLLM knows all that a head's config may name."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert {method.replace("_tensors", "-tensors") for method in QUANTIZATION} <= set(QUANTIZATION_METHODS)
