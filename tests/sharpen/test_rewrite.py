"""A smaller head on disk: fewer draft tokens, 8-bit weights, whole or not at all."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_tools.shared.errors import ToolError
from peagle_tools.sharpen.rewrite import faults, rewrite
from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.head import read_head, read_map, target_ids
from peagle_vllm.heads.target import read_target
from tests.support import models
from tests.support.random_heads import HeadSpec, write_pair

HEADS = {
    "speculators": HeadSpec(),
    "aws": HeadSpec(fmt="aws"),
    "qwen3": HeadSpec(family="qwen3", norm_before_fc=True),
    "reduced": HeadSpec(draft_vocab=300),
}


@pytest.fixture(params=HEADS)
def pair(request, tmp_path):
    target, head = write_pair(tmp_path, HEADS[request.param])
    return read_head(head), read_target(str(target))


def weights(head):
    tensors = load_file(head.folder / "model.safetensors")
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def test_a_trimmed_head_keeps_its_rows(pair, tmp_path):
    head, target = pair
    ids = torch.from_numpy(target_ids(head))
    kept = torch.arange(5, len(ids), 3)
    trimmed = rewrite(head, target, tmp_path / "out", kept, None)
    assert check_pair(trimmed, target) == []
    assert read_map(trimmed).form == "offsets" and target_ids(trimmed).tolist() == ids[kept].tolist()
    before, after = weights(head), weights(trimmed)
    assert torch.equal(after.pop("lm_head.weight"), before.pop("lm_head.weight")[kept])
    assert after.pop("t2d").nonzero().flatten().tolist() == ids[kept].tolist()
    for name in set(before) - {"d2t", "t2d"}:
        assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.5), ("fp8", 32.0)])  # of a step; fp8 has 3 bits of mantissa
def test_quantized_weights_are_near(pair, tmp_path, quantize, error):
    head, target = pair
    quantized = rewrite(head, target, tmp_path / "out", None, quantize)
    assert check_pair(quantized, target) == []
    before, after = weights(head), weights(quantized)
    found = {name for name in after if name.endswith("_scale")}
    assert found == {f"{n}_scale" for n in before if n.endswith("_proj.weight") or n == "lm_head.weight"}
    for name in before:
        if f"{name}_scale" not in found:
            assert torch.equal(after[name].flatten(), before[name].flatten()), name
            continue
        scale = after[f"{name}_scale"]
        assert scale.shape == (len(before[name]), 1)
        away = (after[name].float() * scale - before[name]).abs()
        assert (away <= 1.001 * error * scale).all() and away.mean() > 0, name
    (found,) = faults(quantized, 100, None)
    assert "is quantized already" in found


@pytest.mark.parametrize(
    ("spec", "line"),
    [(HeadSpec(own_lm_head=False), "no lm_head of its own"), (HeadSpec(selector=True), "is sharpened")],
)
def test_what_cannot_be_made_smaller(tmp_path, spec, line):
    (found,) = faults(read_head(write_pair(tmp_path, spec)[1]), 100, None)
    assert line in found and "\n" not in found


@pytest.mark.parametrize("name", ["lm_head.weight", "layers.1.mlp.up_proj.weight"])
def test_nothing_is_left_of_a_broken_head(tmp_path, name):
    target, folder = write_pair(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][7, 3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ToolError, match=f"{name} holds NaN or Inf"):
        rewrite(read_head(folder), read_target(str(target)), tmp_path / "out", torch.arange(9), "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "target"]


class Kernel:
    """For fp8 where vLLM has none (a CPU): the product of the numbers as they were loaded."""

    def process_weights_after_loading(self, layer):
        assert layer.weight.dtype == torch.float8_e4m3fn

    def apply_weights(self, layer, x, bias=None):
        product = x @ (layer.weight.float() * layer.weight_scale.view(1, -1))  # vLLM has turned the weight around
        return product if bias is None else product + bias


@pytest.mark.arm("plugin-v1")
def test_vllm_serves_fp8(tmp_path, monkeypatch):
    """Through vLLM's loader and shapes, with a stand-in for the product; test_record.py serves int8."""
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8 as fp8

    from peagle_tools.shared.acceptance import read_engine
    from tests.support.engines import Request, Settings, engine, shut_down

    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: Kernel())
    monkeypatch.setattr(fp8, "expose_input_quant_key", lambda *args: None)
    kept = torch.arange(412)  # of 512
    head = rewrite(read_head(models.PEAGLE), read_target(str(models.TARGET)), tmp_path / "out", kept, "fp8")
    served = engine(Settings(models.TARGET, head.folder, k=3, llm=(("disable_log_stats", False),)))
    try:
        model = served.drafter.model
        assert model.lm_head.scheme is not None and model.model.layers[0].mlp.down_proj.scheme is not None
        assert not hasattr(model.model.fc, "scheme")
        assert model.config.draft_vocab_size == len(kept)
        prompts = models.prompt_token_ids()[:6]
        served.run([Request(str(i), tuple(ids), 48) for i, ids in enumerate(prompts)])
        assert read_engine(served.llm).length > 2.0  # of drafts that mean nothing: 1.0
    finally:
        shut_down()
