"""The fields that vLLM is given for a head: what a config means that states one thing in several places.

And vLLM's own code reads a head's config alike. And the selector of a sharpened head: each fault is one line, convert
takes it along, and inspect shows it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from peagle_vllm.heads import selector as files
from peagle_vllm.heads.checks import check_head, check_pair
from peagle_vllm.heads.config import FAMILIES, MASK_TOKEN_KEYS, default_aux_layers
from peagle_vllm.heads.convert import convert
from peagle_vllm.heads.fields import field_faults, vllm_fields
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER
from peagle_vllm.heads.head import read_head
from peagle_vllm.sampling.selection import load_selector
from tests.heads import writers
from tests.heads.judging import only
from tests.heads.writers import DRAFT_VOCAB, SERVED, TARGET, VOCAB, Written
from tests.support.command import run
from tests.support.dialects import Tensors
from tests.support.random_heads import write_selector

RANK, TOP_K = 6, 4
Change = Callable[[dict, Tensors], object]


def sharpened(head: Written, folder: Path, change: Change = lambda selector, tensors: None) -> Path:
    """Save ``head`` with a selector; ``change`` spoils the config's entry or the tensors before."""
    return write_selector(head.save(folder), torch.Generator(), candidates=TOP_K, rank=RANK, change=change)


def test_windows_that_trainers_copy_from_the_target_are_none(tmp_path: Path):
    head = SERVED["nemo"]()
    head.config |= {"layer_types": ["sliding_attention"] * head.config["num_hidden_layers"], "sliding_window": 128}
    fields = vllm_fields(read_head(head.save(tmp_path)))
    assert fields["layer_types"] is fields["sliding_window"] is None


LINEAR = {"rope_type": "linear", "factor": 4}


@pytest.mark.parametrize("stated", [{}, {"factor": 4.0}, {"attention_factor": 1.5}])
def test_longrope_scales_attention_as_in_training(stated: dict[str, float], tmp_path: Path):
    """By the head's own length: vLLM would take the served one."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **stated}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    head = writers.vllm()
    head.config.update(rope_parameters=rope, max_position_embeddings=128)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_parameters=rope)
    given = vllm_fields(read_head(head.save(tmp_path)))["rope_parameters"]
    factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", 100)[1]
    assert given["short_mscale"] == given["long_mscale"] == factor > 1


@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize(
    ("name", "layers", "rope"),
    [
        ("speculators-llama", {"rope_scaling": {"rope_type": "default"}, "rope_parameters": LINEAR}, "linear"),
        ("vllm-llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}, "linear"),
        ("speculators-llama", {"rope_scaling": LINEAR}, "linear"),
        ("vllm-llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 1, "alpha": 1000.0}}, "dynamic"),
        ("vllm-llama", {"rotary_emb_base": 5e5}, "default"),
        ("vllm-llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 5e5, **LINEAR}}, "linear"),
        ("speculators-llama", {"rope_scaling": {"rope_theta": 5e5, **LINEAR}, "rope_parameters": LINEAR}, "linear"),
        ("vllm-llama", {"model_type": "qwen2", "rope_parameters": {"rope_type": "default"}}, "default"),
        ("vllm-qwen3", {"max_window_layers": 0, "sliding_window": 4, "use_sliding_window": True}, "default"),
    ],
)
def test_a_copy_means_the_same(name: str, layers: dict[str, Any], rope: str, to: str, tmp_path: Path):
    head = SERVED[name]()
    theta = 5e5 if "500000.0" in str(layers) else 10000.0
    if theta != 10000.0 or "model_type" in layers:
        head.layer_config.pop("rope_theta", None)
    head.layer_config.update(layers)
    (tmp_path / "copy").mkdir()
    source = read_head(head.save(tmp_path / "head"))
    assert not list(field_faults(source))
    fields = vllm_fields(source)
    assert fields["rope_parameters"]["rope_type"] == rope
    assert fields["rope_parameters"].get("alpha") == layers.get("rope_parameters", {}).get("alpha")
    assert fields["rope_parameters"]["rope_theta"] == theta
    assert isinstance(fields["rope_parameters"].get("factor", 1.0), float)  # vLLM fails at a whole number
    convert(source, tmp_path / "copy", to, None)
    copied = vllm_fields(read_head(tmp_path / "copy"))
    same = ("rope_parameters", "layer_types", "sliding_window")
    assert {key: copied[key] for key in same} == {key: fields[key] for key in same}


def vllms_config(folder: Path):
    """The draft config that vLLM's SpeculativeConfig by itself ends with for method eagle3."""
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    config = get_config(str(folder), trust_remote_code=False)
    return config if isinstance(config, SpeculatorsConfig) else EAGLEConfig(config, method="eagle3", model_type="eagle")


def test_mask_token_order(tmp_path: Path):
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    head = SERVED["vllm-llama"]()
    head.config |= {key: place for place, key in enumerate(MASK_TOKEN_KEYS)} | {"dflash_config": {"mask_token_id": 9}}
    assert read_head(head.save(tmp_path)).mask_token_id == get_parallel_drafting_token_id(vllms_config(tmp_path)) == 9
    del head.config["dflash_config"]
    for place, key in enumerate(MASK_TOKEN_KEYS):
        read = read_head(head.save(tmp_path))
        assert (read.mask_token_id, read.mask_token_key) == (place, key)
        assert get_parallel_drafting_token_id(vllms_config(tmp_path)) == place
        del head.config[key]
    assert read_head(head.save(tmp_path)).mask_token_key is None


def test_the_classes_that_know_mask_hidden():
    """vLLM's registry leads exactly these names to the Llama and Qwen3 classes; a new one must be added here."""
    from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS as registry

    for family in ("llama", "qwen3"):
        names = {name for name, (module, _) in registry.items() if module == f"{family}_eagle3"}
        after_prefix = {name for name in names if name.startswith(("Eagle3", "Peagle")) or name.endswith("Eagle3")}
        assert after_prefix == {name for name in FAMILIES if FAMILIES[name] == family}


@pytest.mark.parametrize("num_layers", [1, 5, 7, 24])
def test_default_aux_layers(num_layers: int):
    from vllm.model_executor.models.interfaces import SupportsEagle3

    target = SimpleNamespace(model=SimpleNamespace(layers=range(num_layers)))
    default = SupportsEagle3.get_eagle3_default_aux_hidden_state_layers(target)
    assert default == default_aux_layers(num_layers)


# What the line says -> the change to a sound selector
FAULTS: dict[str, Change] = {
    f"successor_codebook is F32 [{VOCAB}, {RANK}], this head needs floats [{DRAFT_VOCAB}, {RANK}]": (
        lambda s, t: t.update({files.SUCCESSORS: torch.ones(VOCAB, RANK)})
    ),
    "hidden_projection.weight is F32": lambda s, t: t.update({files.PROJECTION: torch.ones(RANK, 2)}),
    "successor_codebook, which is missing": lambda s, t: t.pop(files.SUCCESSORS),
    "edge_scale is [3], ": lambda s, t: t.update({files.EDGE_SCALE: torch.ones(3)}),
    "fitted to another head (hash 0123, this one's is ": lambda s, t: s.update(head_hash="0123"),
    "selector_top_k is 500, the draft vocabulary has 384 tokens": lambda s, t: s.update(selector_top_k=500),
    "candidate_selector are [6, 0], need 1 to 1024": lambda s, t: s.update(selector_top_k=0),
}


@pytest.mark.parametrize("missing", [files.EDGE_SCALE, files.UNARY_SCALE])
def test_a_missing_scale_is_1_at_every_position(missing: str, tmp_path: Path):
    folder = sharpened(writers.vllm(), tmp_path / "head", lambda selector, tensors: tensors.pop(missing))
    assert check_head(read_head(folder)) == []
    hf_config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    draft = SimpleNamespace(model=str(folder), revision=None, dtype=torch.float32, hf_config=hf_config)
    served = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=draft, draft_load_config=None),
        load_config=SimpleNamespace(load_format="auto"),
    )
    selector = load_selector(torch.nn.Module(), served, torch.device("cpu"))
    assert getattr(selector, missing.rpartition(".")[2]).tolist() == [1.0] * 5


@pytest.mark.parametrize("line", FAULTS)
def test_every_fault_is_one_line(line: str, tmp_path: Path):
    folder = sharpened(writers.vllm(draft_vocab=DRAFT_VOCAB), tmp_path / "head", FAULTS[line])
    text = only(check_head(read_head(folder)))
    assert line in text
    assert str(folder) in text
    assert "sharpen" in text.rpartition("; ")[2]


def test_an_entry_that_is_no_object_and_a_damaged_folder(tmp_path: Path):
    head = writers.vllm()
    file = sharpened(head, tmp_path / "head") / SELECTOR_FOLDER / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert "is not a complete safetensors file" in only(check_head(read_head(tmp_path / "head")))
    file.unlink()
    lines = [problem.line for problem in check_head(read_head(tmp_path / "head"))]
    assert len(lines) == 2 and all("which is missing" in line for line in lines)
    head.config[SELECTOR] = [6, 4]
    problems = check_head(read_head(head.save(tmp_path / "head")))
    assert "candidate_selector is [6, 4], needs a JSON object" in only(problems)


@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize("name", SERVED)
def test_inspect_shows_the_selector_and_convert_takes_it_along(name: str, to: str, tmp_path: Path):
    folder, out = sharpened(SERVED[name](), tmp_path / "head"), tmp_path / "out"
    assert check_pair(read_head(folder), TARGET, num_speculative_tokens=5) == []
    assert vllm_fields(read_head(folder))[SELECTOR]  # which the runners read
    assert json.loads(run("inspect", folder, "--json").stdout)["selector"] == {"rank": RANK, "candidates": TOP_K}
    ran = run("convert", folder, out, "--to", to)
    assert ran.exit_code == 0, ran.stderr
    assert check_pair(read_head(out), TARGET, num_speculative_tokens=5) == []
    before, after = (load_file(place / SELECTOR_FOLDER / "model.safetensors") for place in (folder, out))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("shards", [1, 2])
def test_no_file_of_a_selector_is_loaded_into_the_head(shards: int, tmp_path: Path):
    """vLLM passes every tensor that it finds on to the model."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    head = SERVED["vllm-llama"]()
    head.shards = shards
    folder = sharpened(head, tmp_path / "head")
    _, files, *_ = DefaultModelLoader(LoadConfig())._prepare_weights(str(folder), None, None, True, None)
    assert sorted(files) == sorted(str(path) for path in folder.glob("*.safetensors"))
    assert len(files) == shards
