"""What ``inspect`` says of a head's config is what the server does with it, whatever stands in its fields.

The fields are those that vLLM or transformers reads of a head's config: while a head is loaded, by the source of its
classes, or to check their types. Their values are those that a stranger's config may have there.
"""

import copy
import importlib
import inspect
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from peagle_vllm.heads.checks import check
from peagle_vllm.heads.fields import QUANTIZATION
from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import Target, read_target
from peagle_vllm.serving import RefusedError
from tests.support import random_heads as tiny_heads
from tests.support.dialects import BESIDE_LAYERS, Written, read
from tests.support.engines import Engine, Settings, engine

ROWS = 24


def load(live: Engine, head: Path, *, stock: bool = False) -> torch.Tensor:
    """Float32 [ROWS, vocabulary] logits of a head on random rows, in 20 ms: engines for a thousand heads take an hour.

    The server's code checks the configuration, and builds and loads the head; attention is computed here, because
    vLLM's needs a KV cache.

    Args:
        live: an engine of the head's target, which lends its configuration.
        stock: whether vLLM reads the head's config by itself.
    """
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader import get_model

    base = live.llm.llm_engine.vllm_config
    compilation = copy.copy(base.compilation_config)
    compilation.static_forward_context = {}  # the layers of each head have the same names
    arguments: dict[str, Any] = {"model": str(head), "num_speculative_tokens": 5, "prompt_lookup_min": 0}
    arguments |= {"method": "eagle3", "parallel_drafting": True, "target_model_config": base.model_config}
    with ExitStack() as stack:
        stack.enter_context(patch("time.sleep"))  # vLLM tries twice to read a config
        if stock:
            own = SpeculativeConfig.__post_init__.__wrapped__
            stack.enter_context(patch.object(SpeculativeConfig, "__post_init__", own))
        spec = SpeculativeConfig(target_parallel_config=base.parallel_config, **arguments)
        config = replace(base, speculative_config=spec, compilation_config=compilation)
        stack.enter_context(set_current_vllm_config(config))
        model = get_model(vllm_config=config, model_config=spec.draft_model_config, load_config=base.load_config)
        stack.enter_context(patch.object(Attention, "forward", attend))
        stack.enter_context(set_forward_context(None, config))
        with torch.inference_mode():
            gen = torch.Generator().manual_seed(0)
            tokens = torch.randint(3, 500, (ROWS,), generator=gen)
            aux = torch.randn(ROWS, model.model.fc_input_size, generator=gen)
            hidden, _ = model(tokens, torch.arange(ROWS), model.combine_hidden_states(aux))
            return model.compute_logits(hidden)


def attend(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence, in place of vLLM's ``Attention.forward``."""
    q, k, v = (t.view(len(t), -1, layer.head_size).transpose(0, 1) for t in (query, key, value))
    distance = torch.arange(ROWS)[:, None] - torch.arange(ROWS)
    visible = (distance >= 0) & (distance < (layer.sliding_window or ROWS)) | (layer.attn_type != "decoder")
    mixed = F.scaled_dot_product_attention(q, k, v, visible, scale=layer.impl.scale, enable_gqa=True)
    return mixed.transpose(0, 1).reshape(ROWS, -1)


pytestmark = pytest.mark.arm("plugin-v1")

LAYOUTS = [(family, fmt) for family in ("llama", "qwen3") for fmt in ("vllm", "speculators")]
# What vLLM by itself serves otherwise: a bias that no file holds, and attention to tokens that come later.
MISREAD = {"bias", "is_causal", "rope_parameters.mrope_section", "rope_parameters.is_deepseek_v4"}
SOURCES = (
    *(f"vllm.model_executor.models.{name}" for name in ("llama", "llama_eagle3", "qwen2", "qwen3", "qwen3_eagle3")),
    "vllm.model_executor.layers.rotary_embedding",
    "vllm.transformers_utils.configs.speculators.algos",
    "vllm.v1.worker.gpu.spec_decode.utils",
)
# config.name, config["name"], config.get("name"), getattr(config, "name"); "name" in config; of a rope: k in ("name",)
READ = re.compile(r"""(?<![\w.])(?:self\.)?(\w+)(?:(?:\.get\(|\[|,)\s*["'](\w+)["']|\.([a-z]\w*)\b(?!\())""")
TESTED = re.compile(r"""["'](\w+)["'] (?:not )?in (\w+)""")
KEYS_OF_A_ROPE = re.compile(r"if k\s+in \(([^)]*)\)")
CONFIGS = {"config", "hf_config", "config_dict", "pre_trained_config"}
INNER = {"rope_parameters", "eagle_config", "dflash_config"}  # objects in a config
MISSING = object()


@contextmanager
def recording(names: set[str]) -> Iterator[None]:
    """Note every attribute of a config that vLLM reads meanwhile."""
    from transformers import PreTrainedConfig

    original = PreTrainedConfig.__getattribute__

    def getattribute(self: Any, name: str) -> Any:
        is_field = not name.startswith("_") and not callable(getattr(type(self), name, None))
        if is_field and "/vllm/" in sys._getframe(1).f_code.co_filename:
            names.add(name)
        return original(self, name)

    with patch.object(PreTrainedConfig, "__getattribute__", getattribute):
        yield


def named_in_source() -> set[str]:
    """Fields by the names that the source asks a config for; those of an inner object with its name and a dot."""
    names = set()
    for module in SOURCES:
        source = inspect.getsource(importlib.import_module(module))
        read = [(config, key or attribute) for config, key, attribute in READ.findall(source)]
        for config, name in [*read, *((config, name) for name, config in TESTED.findall(source))]:
            names |= {name} if config in CONFIGS else {f"{config}.{name}"} if config in INNER else set()
        if module.endswith("rotary_embedding"):
            keys = re.findall(r"\w+", "".join(KEYS_OF_A_ROPE.findall(source)))
            names |= {f"rope_parameters.{key}" for key in keys}
    return {name for name in names if not name.startswith("_")}


# One object for each type of rotary embedding, whose fields are changed in it.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic with alpha": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    "ntk": {"rope_type": "ntk", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32},
}
KNOWN = {  # values of fields that the tests' heads do not state
    "dtype": "float32",
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": 8,
    "logit_scale": 2.0,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"quant_method": "fp8"},
    "sub_configs": {},
}


@dataclass(frozen=True)
class Case:
    field: str
    value: Any
    rope: str = ""  # the type of rotary embedding that the head has for it

    def write(self, plain: Path) -> Path:
        """A copy of a head with it."""
        *inner, name = self.field.split(".")
        head = read(plain)
        layers = head.layer_config
        if self.rope:
            layers["rope_parameters"] = dict(ROPES[self.rope])
        place = head.config if name in BESIDE_LAYERS and not inner else layers
        for key in inner:
            place[key] = dict(place.get(key) or {})
            place = place[key]
        place.pop(name, None)
        if self.value is not MISSING:
            place[name] = copy.deepcopy(self.value)
        return head.save(plain.parent / "head")


def cases(names: set[str], head: Written) -> Iterator[Case]:
    """Every field with each of its values, by what ``head`` has there."""
    for field in sorted(names):
        *inner, name = field.split(".")
        ropes = [rope for rope, content in ROPES.items() if name in content] or ["default"]
        for rope in ropes if inner == ["rope_parameters"] else [""]:
            stated = {**KNOWN, **head.config, **head.layer_config, **ROPES.get(rope, {})}.get(name, 8)
            yield from (Case(field, value, rope) for value in values(stated))


def values(stated: Any) -> list[Any]:
    """What may stand in place of a value: nothing, another type, the value in something else."""
    text = stated.upper() if isinstance(stated, str) else json.dumps(stated)
    whole = [int(stated)] if type(stated) is float else []
    number = float(stated) if type(stated) is int else 0.5
    return [MISSING, None, text, [stated], True, False, 0, number, *whole, {"full_attention": stated}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    logging.disable(logging.CRITICAL)
    yield engine(Settings(tiny_heads.write_target(tmp_path_factory.mktemp("fields") / "target")))
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def names(live: Engine, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    from transformers import LlamaConfig, Qwen3Config

    seen = {field.name for config in (LlamaConfig, Qwen3Config) for field in fields(config)}  # whose types are checked
    for family, fmt in LAYOUTS:
        spec = tiny_heads.HeadSpec(family=family, fmt=fmt)
        head = tiny_heads.write_head(tmp_path_factory.mktemp("recorded") / "head", live.settings.target, spec)
        with recording(seen):
            load(live, head, stock=True)
    return seen | named_in_source()


def judged(live: Engine, head: Path, target: Target) -> torch.Tensor | str:
    """Logits of a served head, or the line that refuses it; AssertionError where ``inspect`` says something else."""
    try:
        lines = [problem.line for problem in check(read_head(head), target) if problem.severity == "error"]
    except HeadError as error:
        lines = [str(error)]
    if not lines:
        return load(live, head)
    with pytest.raises(RefusedError) as refused:
        load(live, head)
    assert str(refused.value) == f"P-EAGLE refused: {lines[0]}"
    assert len(lines[0].splitlines()) == 1 and len(lines[0]) < 600
    return lines[0]


def right_logits(live: Engine, plain: Path, case: Case, base: torch.Tensor) -> torch.Tensor:
    """What a head that is served for this case must compute: as in stock vLLM, where that reads the field rightly."""
    if case.field in MISREAD:
        return base
    try:
        return load(live, case.write(plain), stock=True)
    except Exception:  # vLLM by itself does not take what means nothing; null is as good as absent
        return load(live, replace(case, value=MISSING).write(plain)) if case.value is None else base


@pytest.mark.parametrize("step", [6 * len(LAYOUTS), pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_verdicts(layout: tuple[str, str], step: int, live: Engine, names: set[str], tmp_path: Path):
    """Each sixth value in one of the layouts; in the full run each in each."""
    spec = tiny_heads.HeadSpec(family=layout[0], fmt=layout[1])
    plain = tiny_heads.write_head(tmp_path / "own", live.settings.target, spec)
    target, bases = read_target(str(live.settings.target)), {"": load(live, plain)}
    for rope, content in ROPES.items():
        bases[rope] = load(live, with_fields(plain, {"rope_parameters": content}))
    wrong, seen = [], Counter[str]()
    for case in list(cases(names, read(plain)))[LAYOUTS.index(layout) % step :: step]:
        try:
            verdict = judged(live, case.write(plain), target)
            if not isinstance(verdict, str):
                assert torch.equal(verdict, right_logits(live, plain, case, bases[case.rope])), "another meaning"
            seen["refused" if isinstance(verdict, str) else "served"] += 1
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}"[:400])
    print(seen)
    assert not wrong, "\n".join(wrong)
    assert seen["served"] > 7 and seen["refused"] > 7


BY_TYPE = {"full_attention": ROPES["default"], "sliding_attention": ROPES["default"] | {"rope_theta": 1e6}}
SERVED: dict[str, dict[str, Any]] = {
    "a rope by layer type": {"rope_parameters": BY_TYPE},
    "of M-RoPE": {"rope_parameters": ROPES["default"] | {"mrope_section": [4, 6, 6], "mrope_interleaved": True}},
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


def with_fields(plain: Path, content: dict[str, Any]) -> Path:
    """A copy of a head whose layers' config has these fields; without those that are None."""
    head = read(plain)
    for key, value in content.items():
        head.layer_config.pop(key, None)
        head.layer_config.update({} if value is None else {key: value})
    return head.save(plain.parent / "head")


@pytest.mark.parametrize("fmt", ["vllm", "speculators"])
def test_what_several_fields_say(fmt: str, live: Engine, tmp_path: Path):
    plain = tiny_heads.write_head(tmp_path / "own", live.settings.target, tiny_heads.HeadSpec(fmt=fmt))
    target, logits = read_target(str(live.settings.target)), load(live, plain)
    for name, content in SERVED.items():
        verdict = judged(live, with_fields(plain, content), target)
        assert isinstance(verdict, torch.Tensor) and torch.equal(verdict, logits), name
    for beginning, content in REFUSED.items():
        assert str(judged(live, with_fields(plain, content), target)).startswith(beginning)


def test_quantization_methods():
    """vLLM knows all that a head's config may name."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert {method.replace("_tensors", "-tensors") for method in QUANTIZATION} <= set(QUANTIZATION_METHODS)
