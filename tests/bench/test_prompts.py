"""The prompts of a suite's file, as `vllm bench serve` is given them."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from peagle_tools.bench.client import write_prompts
from tests.support.models import TARGET

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.mark.parametrize("raw", [False, True])
def test_conversations_are_sent_whole(raw: bool, tmp_path: Path) -> None:
    """In the target's template, as vLLM's data set puts single prompts in it, or raw."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}) + '\n{"prompt": "What?"}\n')
    args = Namespace(prompts=str(tmp_path / "a.jsonl"), model=str(TARGET), skip_chat_template=raw)
    write_prompts(args, tmp_path / "out.jsonl")
    assert (args.dataset_name, args.dataset_path) == ("custom", str(tmp_path / "out.jsonl"))
    assert args.skip_chat_template
    sent = [json.loads(line)["prompt"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    template = AutoTokenizer.from_pretrained(TARGET).apply_chat_template
    single = [{"role": "user", "content": "What?"}]
    chats = [template(chat, add_generation_prompt=True, tokenize=False) for chat in (CHAT, single)]
    assert sent == (["Be brief.\nWhy?", "What?"] if raw else chats)
