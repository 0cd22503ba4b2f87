"""What an engine can be: LoRA, weights reloaded, KV connectors, whole prefixes kept, a head in 8 bits."""

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from peagle_tools.shared.acceptance import read_engine, repeated_tokens
from tests.conftest import ARM
from tests.features.asking import SETTINGS, ask
from tests.support.engines import BLOCK_SIZE, Request, Settings, engine, without_speculation
from tests.support.models import PEAGLE, TARGET, prompt_token_ids

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

ANSWER = 8 if ARM == "plugin-v2" else 24  # V2 runs under Triton's interpreter
REQUESTS = [ask(i, ANSWER) for i in range(4)]


def answers(settings: Settings, requests: Sequence[Request] = REQUESTS) -> list[list[int]]:
    finished = engine(settings).run(requests)
    return [finished[request.id].output for request in requests]


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


@pytest.mark.arm("plugin-v1")  # V2: docs/features.md has vLLM's line
def test_lora_target(tmp_path: Path):
    settings = replace(SETTINGS, llm=(*SETTINGS.llm, ("enable_lora", True), ("max_lora_rank", 8), ("max_loras", 1)))
    alone = replace(settings, head=None)
    base = answers(alone)
    from vllm.lora.request import LoRARequest

    adapted = [replace(r, lora=LoRARequest("random", 1, str(write_lora(tmp_path)))) for r in REQUESTS]
    plain = answers(alone, adapted)
    assert plain != base, "the adapter must change something"
    assert answers(settings, adapted) == plain


def test_target_weights_reloaded_in_place():
    before = answers(SETTINGS)
    runner = engine(SETTINGS).runner
    with torch.inference_mode():
        runner.get_model().model.norm.weight.neg_()
    assert answers(SETTINGS) != before
    runner.reload_weights()
    assert answers(SETTINGS) == before


def test_kv_connector(tmp_path: Path):
    """Each engine stores its KV, the drafter's too, and takes it back for the same prompts."""
    known = []
    for name, settings in (("plain", replace(SETTINGS, head=None)), ("speculated", SETTINGS)):
        connector = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / name)},
        }
        settings = replace(settings, llm=(*settings.llm, ("kv_transfer_config", connector)))
        known += [answers(settings), answers(settings)]
    assert all(answer == known[0] for answer in known)
    stored = [len(list((tmp_path / name).glob("*/*.safetensors"))) for name in ("plain", "speculated")]
    assert stored[1] > stored[0] > 0, "the drafter's layers are stored too"


def test_the_last_shared_block_may_be_kept():
    """The drafter's last row of a shared prefix has read another request's next token; no output may differ."""
    prompts, num_shared = prompt_token_ids(), 2 * BLOCK_SIZE
    shared = (prompts[0] * num_shared)[:num_shared]
    requests = [Request(str(i), (*shared, 100 + i, *prompts[i]), ANSWER, arrives=2 * (i > 0)) for i in range(3)]
    finished = {}
    for keep in (False, True):
        options = (("disable_eagle_block_drop", keep),)
        finished[keep] = engine(replace(SETTINGS, prefix_caching=True, speculative=options)).run(requests)
        cached = [finished[keep][request.id].num_cached_tokens for request in requests]
        assert cached == [0, *[num_shared if keep else num_shared - BLOCK_SIZE] * 2]
    plain = without_speculation(SETTINGS, requests)
    assert all(finished[keep][name].output == plain[name].output for keep in finished for name in plain)


def test_drafts_count_as_repeated_where_they_are_looked_up(monkeypatch: pytest.MonkeyPatch):
    """What ``bench`` and ``diagnose`` reckon from token ids and counts of steps is what look-up did."""
    settings = replace(SETTINGS, lookup=2, llm=(*SETTINGS.llm, ("per_request_spec_decode_metrics", "detailed")))
    module = import_module(type(engine(settings).drafter).__module__)
    was_looked_up = {}

    def lookup_drafts(drafts: torch.Tensor, token_ids: torch.Tensor, rows: torch.Tensor, last: torch.Tensor, *rest):
        before = drafts.clone()
        original(drafts.fill_(-1), token_ids, rows, last, *rest)
        for i, (row, end) in enumerate(zip(rows.tolist(), last.tolist(), strict=True)):
            was_looked_up[tuple(token_ids[row, : end + 1].tolist())] = bool((drafts[i] >= 0).all())
        drafts.copy_(drafts.where(drafts >= 0, before))

    original = module.lookup_drafts
    monkeypatch.setattr(module, "lookup_drafts", lookup_drafts)
    judged = {}
    for done in engine(settings).run(REQUESTS).values():
        output = done.raw
        metrics, known = output.outputs[0].spec_decode_metrics.to_dict(), len(output.prompt_token_ids) + 1
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        ends = [known + i + sum(metrics["per_step_accepted"][:i]) for i in range(metrics["num_spec_steps"])]
        for end, matched in zip(ends, repeated_tokens(ids, ends), strict=True):
            judged[tuple(ids[:end])] = matched >= settings.lookup
    assert {True, False} == {*judged.values()} and judged == {ids: was_looked_up[ids] for ids in judged}


def test_vllm_quantizes_a_head_while_it_loads_it():
    """Its layers and ``fc``, not ``lm_head``. Of the methods for linear layers a CPU has kernels for this one."""
    online, stats = (("quantization", "fp8_per_channel"),), (("disable_log_stats", False),)
    live = engine(Settings(TARGET, PEAGLE, k=3, dtype="bfloat16", speculative=online, llm=stats))
    model = live.drafter.model
    for layer in (*model.model.layers, None):
        weight = layer.mlp.down_proj.weight if layer else model.model.fc.weight
        assert weight.dtype == torch.float8_e4m3fn
    assert model.lm_head.weight.dtype == torch.bfloat16
    live.run([Request(str(i), tuple(ids[:60]), 24) for i, ids in enumerate(prompt_token_ids()[:4])])
    assert read_engine(live.llm).length > 1.7  # of drafts that mean nothing: 1.0
