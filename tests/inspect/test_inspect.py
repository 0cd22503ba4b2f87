"""``peagle-vllm inspect``: the table, the JSON, the exit status."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from peagle_vllm.heads import check_weights
from tests.heads import writers
from tests.heads.writers import FOREIGN, HIDDEN, SERVED, VOCAB
from tests.support.command import only_line, run
from tests.support.models import PEAGLE, TARGET


def inspected(*arguments: object) -> dict:
    ran = run("inspect", "--json", *arguments)
    assert ran.stderr == ""
    data = json.loads(ran.stdout)
    assert ran.exit_code == (0 if data["fit"] else 1)
    return data


@pytest.mark.parametrize("name", SERVED | FOREIGN)
def test_facts_of_every_dialect(name: str, tmp_path: Path):
    head = (SERVED | FOREIGN)[name]()
    head.save(tmp_path / "head")
    data = inspected(tmp_path / "head")
    forms = {"aws": "identity", "speculators-reduced": "offsets"}
    assert name not in forms or data["vocabulary_map"] == forms[name]
    assert (data["layers"], data["hidden_size"], data["vocab_size"]) == (2, HIDDEN, VOCAB)
    assert data["tensors"] == len(head.tensors)
    assert data["bytes"] == sum(t.numel() * t.element_size() for t in head.tensors.values())
    assert data["trained_depth"] == (8 if name.startswith(("speculators", "nemo")) else None)
    assert data["fit"] is (name != "specforge") and data["selector"] is None


def test_the_table_of_a_shipped_head():
    ran = run("inspect", PEAGLE, "--target", TARGET)
    assert (ran.exit_code, ran.stderr) == (0, "")
    words = " ".join(ran.stdout.split())
    for fact in (
        "layers 4",
        "aux layers [2, 5, 7] aux key eagle_aux_hidden_state_layer_ids",
        "mask token 6 mask token key mask_token_id mask token text <|mask|> mask token kind special",
        "mask hidden BF16 [1, 1, 384]",
        "trained depth 8",
        'parameters 1001088 bytes 2002176 dtypes ["BF16"]',
        '"parallel_drafting": true, "num_speculative_tokens": 5',
        "fits ",
    ):
        assert fact in words
    facts = [line for line in ran.stdout.splitlines() if "--speculative-config" not in line and "fits" not in line]
    assert max(map(len, facts)) <= 80


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_number_is_looked_at(value: float, dtype: torch.dtype, tmp_path: Path):
    head = writers.speculators()
    head.tensors = {name: tensor.to(dtype) for name, tensor in head.tensors.items()}
    head.tensors["layers.1.mlp.down_proj.weight"][3, 5] = value
    head.save(tmp_path / "head")
    (problem,) = inspected(tmp_path / "head")["problems"]
    assert problem["line"].startswith("layers.1.mlp.down_proj.weight holds NaN or Inf: ")


@pytest.mark.parametrize("template", ["tokenizer_config.json", "chat_template.jinja"])
def test_the_mask_token_by_the_targets_tokenizer(template: str, tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir()
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 8, "eos_token_id": [3, 60]}
    added = [{"id": 60, "content": "<|end|>"}, {"id": 61, "content": "<|mask|>"}, {"id": 62, "content": "<|user|>"}]
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"the": 5}}}))
    text = "<|user|>{{ text }}"
    (target / template).write_text(json.dumps({"chat_template": text}) if template.endswith("json") else text)
    wanted = {60: ("<|end|>", "in use"), 61: ("<|mask|>", "special"), 62: ("<|user|>", "in use")}
    for number, (text, kind) in (wanted | {5: ("the", "ordinary"), 7: (None, "unused")}).items():
        head = writers.speculators()
        head.config["mask_token_id"] = number
        data = inspected(head.save(tmp_path / "head"), "--target", target)
        assert (data["mask_token"], data["mask_token_text"], data["mask_token_kind"]) == (number, text, kind)
        warned = [p["line"] for p in data["problems"] if p["severity"] == "warning"]
        assert len(warned) == (kind in ("in use", "ordinary"))


def test_a_plain_model_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its weights, which may be hundreds of gigabytes, are not read."""
    monkeypatch.setattr(check_weights, "read_tensor", None)
    ran = run("inspect", TARGET)
    assert (ran.exit_code, ran.stderr) == (1, "")
    assert f"unfit    {TARGET} is a target, not a head; name a head, and this model as the target" in ran.stdout
    config = json.loads((TARGET / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "with pictures", "text_config": config}))
    assert f"{tmp_path} is a target, not a head" in only_line(run("inspect", tmp_path))


def test_what_cannot_be_read_is_one_line(tmp_path: Path):
    config = tmp_path / "config.json"
    for content in (b"{", "{}".encode("utf-16"), "{}".encode("utf-8-sig")):  # vLLM reads none of them
        config.write_bytes(content)
        assert "config.json is not valid JSON" in only_line(run("inspect", tmp_path))
    for command in (["inspect", config], ["inspect", PEAGLE, "--target", config]):
        assert f"{config} is a file; name its folder" in only_line(run(*command))
    config.write_text("{}")
    line = only_line(run("inspect", PEAGLE, "--target", tmp_path))
    assert line == f"peagle-vllm: target: hidden_size is missing: {config}; add it"


def test_inspect_and_convert_need_neither_torch_nor_vllm(tmp_path: Path):
    script = (
        "import sys\nfrom peagle_tools.cli import app\n"
        "slow = {'huggingface_hub', 'numpy', 'pydantic', 'rich.progress', 'torch', 'vllm', 'yaml'}\n"
        "assert not slow & set(sys.modules), 'the help would be slow'\n"
        "for arguments in (['inspect', sys.argv[1], '--target', sys.argv[2]], ['convert', sys.argv[1], sys.argv[3]]):\n"
        "    try:\n        app(arguments)\n"
        "    except SystemExit as end:\n        assert not end.code, end.code\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", script, str(PEAGLE), str(TARGET), str(tmp_path / "out")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
