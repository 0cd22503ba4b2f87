"""What an engine can be: LoRA targets, weights reloaded, KV connectors. Output as without speculation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines import Settings, engine
from tests.features.comparing import SETTINGS, Case, both, outputs, tokens
from tests.models import TARGET, prompt_token_ids

pytestmark = pytest.mark.arm("plugin-v1")

CASES = [Case(i, 24) for i in range(4)]


def write_lora(folder: Path) -> Path:
    """A random LoRA adapter of rank 8 on the target's attention."""
    config = json.loads((TARGET / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    widths = {"q_proj": config["num_attention_heads"] * head_dim, "v_proj": config["num_key_value_heads"] * head_dim}
    rng = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, hidden, generator=rng) * 0.1
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, 8, generator=rng) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": sorted(widths), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


def test_lora_target(tmp_path: Path):
    from vllm.lora.request import LoRARequest

    settings = replace(
        SETTINGS, llm=(*SETTINGS.llm, ("enable_lora", True), ("max_lora_rank", 8), ("max_loras", 1))
    )
    adapter = LoRARequest("random", 1, str(write_lora(tmp_path)))
    base = [tokens(output) for output in outputs(replace(settings, head=None), CASES)]
    plain, speculated = (with_lora(chosen, adapter) for chosen in (replace(settings, head=None), settings))
    assert plain != base, "the adapter must change something"
    assert speculated == plain


def with_lora(settings: Settings, adapter: object) -> list[list[list[int]]]:
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=prompt_token_ids()[case.prompt]) for case in CASES]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return [
        tokens(output)
        for output in engine(settings).llm.generate(prompts, params, lora_request=adapter, use_tqdm=False)
    ]


def test_weights_reloaded_in_place():
    before = [tokens(output) for output in outputs(SETTINGS, CASES)]
    live = engine(SETTINGS)
    live.runner.reload_weights()
    live.drafter.model.load_weights(iter(load_file(SETTINGS.head / "model.safetensors").items()))
    assert [tokens(output) for output in outputs(SETTINGS, CASES)] == before


def test_kv_connector(tmp_path: Path):
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    settings = replace(SETTINGS, llm=(*SETTINGS.llm, ("kv_transfer_config", connector)))
    for plain, speculated in both(settings, CASES):
        assert tokens(speculated) == tokens(plain)
