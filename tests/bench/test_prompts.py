"""The prompts of a suite's file, as `vllm bench serve` is given them."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from peagle_tools.bench import client
from tests.support.models import TARGET


def test_conversations_are_sent_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the target's template, as vLLM's data set puts single prompts in it; raw where it has none."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}) + '\n{"prompt": "What?"}\n')
    args, out = Namespace(prompts=str(tmp_path / "a.jsonl"), model=str(TARGET)), tmp_path / "out.jsonl"
    client.write_prompts(args, out)
    assert (args.dataset_name, args.dataset_path, args.skip_chat_template) == ("custom", str(out), True)
    sent = [json.loads(line)["prompt"] for line in out.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    template = tokenizer.apply_chat_template
    chats = (chat, [{"role": "user", "content": "What?"}])
    assert sent == [template(turns, add_generation_prompt=True, tokenize=False) for turns in chats]
    tokenizer.chat_template = None
    monkeypatch.setattr(client, "read_tokenizer", lambda _: tokenizer)
    client.write_prompts(args, out)
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["Be brief.\nWhy?", "What?"]
