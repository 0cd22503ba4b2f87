"""Prompts of a data set: no answers, no personal data, nothing lost in silence."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompts import PROMPTS
from peagle_tools.train.config import Data
from peagle_tools.train.from_target import openings
from peagle_tools.train.prompts import write_prompts
from tests.support.models import MODELS, TARGET

PLANTED = {
    "EMAIL_ADDRESS": ("jane.doe@example.com", "first+tag@mail.example.co.uk", "ops_team@sub.domain.org"),
    "CREDIT_CARD": ("4111 1111 1111 1111", "5500-0000-0000-0004", "340000000000009", "6011000000000004"),
    "IBAN_CODE": ("DE89 3704 0044 0532 0130 00", "GB29NWBK60161331926819", "FR1420041010050500013M02606"),
    "PHONE_NUMBER": ("+49 30 901820", "(212) 555-0187", "+44 20 7946 0018", "+81 3-3224-9999", "415-555-2671"),
    "IP_ADDRESS": ("203.0.113.77", "10.24.3.9", "2001:db8:85a3::8a2e:370:7334"),
}
SENTENCES = ("Please write a note about {} for me.", "{} is what the log shows; why?", "Summarise: a, b, {}, c.")


def written(tmp_path: Path, rows: list[Any], **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of prompts.jsonl that are made of ``rows``, and the report."""
    source, out = tmp_path / "source.jsonl", tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = write_prompts(Data(prompts=[str(source)], **options), out)
    return [json.loads(line) for line in out.read_text().splitlines()], report


def planted() -> list[dict[str, str]]:
    return [{"prompt": s.format(each)} for some in PLANTED.values() for each in some for s in SENTENCES]


def test_planted_personal_data_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one, of its kind, and nothing goes to the network for it."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("goes to the network"))
    lines, report = written(tmp_path, [{"prompt": "What is a hash table?"}, *planted()])
    assert [line["messages"][0]["content"] for line in lines] == ["What is a hash table?"]
    dropped = [json.loads(line) for line in (tmp_path / "prompts.dropped.jsonl").read_text().splitlines()]
    assert {row["messages"] for row in dropped} == {None}
    texts = [each for some in PLANTED.values() for each in some for _ in SENTENCES]
    kinds = {text: kind for kind, some in PLANTED.items() for text in some}
    found = {int(row["source"].rpartition(":")[2]): row["pii"] for row in dropped}
    for number, text in enumerate(texts, start=2):
        assert kinds[text] in found[number], text
    assert report["rows"]["dropped for personal data"] == len(texts)
    assert report["NOT looked for"] == ["names", "places"]


def test_masked_prompts_hold_no_personal_data(tmp_path: Path) -> None:
    lines, _ = written(tmp_path, planted(), pii_action="mask")
    texts = "\n".join(line["messages"][0]["content"] for line in lines)
    for kind, some in PLANTED.items():
        assert f"<{kind}>" in texts
        assert not [text for text in some if text in texts]
    assert all(line["pii"] for line in lines)


def test_a_model_for_token_classification_finds_names_and_places(tmp_path: Path) -> None:
    """One in a folder, made to see a name in alice and a place in paris, and nothing else."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

    words = {"[UNK]": 0, "[PAD]": 1, "alice": 2, "paris": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(tmp_path)
    config = BertConfig(
        vocab_size=4,
        hidden_size=4,
        num_attention_heads=1,
        num_hidden_layers=0,
        id2label={0: "O", 1: "B-PER", 2: "B-LOC"},
    )
    model = BertForTokenClassification(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.bert.embeddings.LayerNorm.weight.fill_(1)
        model.bert.embeddings.word_embeddings.weight.copy_(torch.eye(4))
        model.classifier.weight[1, words["alice"]] = model.classifier.weight[2, words["paris"]] = 10
    model.save_pretrained(tmp_path)
    rows = [{"prompt": text} for text in ("Where does Alice live?", "Is Paris large?", "What is a hash table?")]
    lines, report = written(tmp_path, rows, pii_action="mask", ner=str(tmp_path))
    texts = {line["messages"][0]["content"]: line["pii"] for line in lines}
    assert texts == {
        "Where does <PERSON> live?": {"PERSON": 1},
        "Is <LOCATION> large?": {"LOCATION": 1},
        "What is a hash table?": {},
    }
    assert report["NOT looked for"] == []


def test_a_clean_corpus_is_kept(tmp_path: Path) -> None:
    """Python source, and questions of many kinds: 98 of 100 at least."""
    source = [json.loads(line) for line in (MODELS / "prompts/heldout.jsonl").read_text().splitlines()]
    lines, report = written(tmp_path, [*source, *({"prompt": text} for text in PROMPTS)])
    assert len(lines) >= 0.98 * (len(source) + len(PROMPTS)), report


def test_only_what_systems_and_users_said_is_kept(tmp_path: Path) -> None:
    """In the forms that data sets have. Each turn of a conversation stays: the target answers it itself."""
    said = ["Be brief.", "One?", "Two?"]
    turns = [{"role": "system", "content": said[0]}, {"role": "user", "content": said[1]}]
    turns += [{"role": "assistant", "content": "An answer."}, {"role": "user", "content": said[2]}]
    shared = [{"from": "human", "value": "A question?"}, {"from": "gpt", "value": "An answer."}]
    rows = [{"messages": turns}, {"conversations": shared}, {"instruction": "Do it.", "output": "An answer."}]
    lines, report = written(tmp_path, [*rows, {"prompt": "Do it."}, {"id": 7}], pii="none")
    contents = sorted([message["content"] for message in line["messages"]] for line in lines)
    assert contents == [["A question?"], said, ["Do it."]]
    assert [line["id"] for line in lines] == sorted({line["id"] for line in lines})
    assert report["rows"] == {
        "rows": 5,
        "without a prompt in text": 1,
        "duplicates": 1,
        "answers and tool results left out": 2,
        "conversations of several turns": 1,
        "dropped for personal data": 0,
        "kept": 3,
        "kept with personal data masked": 0,
    }
    assert len(report["NOT looked for"]) == 7


def wrote(*texts: str, end: str = "stop") -> list[dict[str, Any]]:
    """Prompts of a target's own."""
    return [{"messages": [{"role": "user", "content": text}], "end": end} for text in texts]


def test_what_the_target_wrote_is_dropped_by_reason(tmp_path: Path) -> None:
    """What is kept has its number, so that it can be found in what was sampled."""
    own = wrote("What is a hash table?", "Too short a one", "Too short", "x" * 600, "x" * 601, "What is a hash table?")
    own += wrote("Mail jane.doe@example.com a note for me.")
    own += wrote("This goes on", end="length") + wrote("<|user|> of another turn", end="special token")
    report = write_prompts(Data(), tmp_path / "out.jsonl", own)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {line["source"] for line in lines} == {"target:1", "target:2", "target:4"}
    counts = {name: count for name, count in report["rows"].items() if count}
    assert counts == {
        "written by the target": 9,
        "not ended": 1,
        "with a special token": 1,
        "outside 15 to 600 characters": 2,
        "duplicates": 1,
        "dropped for personal data": 1,
        "kept": 3,
    }


def test_what_is_near_to_a_measured_prompt_is_dropped(tmp_path: Path) -> None:
    """Planted among prompts of other kinds: reworded, in another case and layout, within another text, cut short."""
    measured = [json.loads(line) for line in (MODELS / "prompts/heldout.jsonl").read_text().splitlines()]
    long = [row["prompt"] for row in measured if len(row["prompt"].split()) > 10]
    assert len(long) > 20
    changes = (
        lambda words: [word if at % 12 else "something" for at, word in enumerate(words)],
        lambda words: [word.upper() for word in words],
        lambda words: ["Please", "look", "at", "this", "first", *words, "and", "say", "what", "you", "think"],
        lambda words: words[: len(words) * 2 // 3],
    )
    planted = {" ".join(change(text.split())) for text in long for change in changes}
    turns = [{"role": "user", "content": "Compose a travel blog post."}, {"role": "user", "content": PROMPTS[0]}]
    files = [tmp_path / "measured.jsonl", tmp_path / "turns.jsonl"]
    files[0].write_text("".join(json.dumps({"prompt": text}) + "\n" for text in long))
    files[1].write_text(json.dumps({"messages": turns}) + "\n")
    own = wrote(*planted, *PROMPTS)
    out = tmp_path / "out.jsonl"
    report = write_prompts(Data(pii="none", apart_from=[str(file) for file in files]), out, own)
    kept = {json.loads(line)["messages"][0]["content"] for line in out.read_text().splitlines()}
    assert not kept & planted
    assert kept == {text for text in PROMPTS[1:] if 15 <= len(text) <= 600}
    dropped = [json.loads(line) for line in out.with_suffix(".dropped.jsonl").read_text().splitlines()]
    assert len(dropped) == report["rows"]["near to a measured prompt"]
    assert {row["messages"] for row in dropped} == {None} and "turns.jsonl:1" in {row["near"] for row in dropped}


def test_the_opening_of_a_users_turn_is_what_the_chat_template_says() -> None:
    """Of templates with tokens and with plain words around a turn, after system prompts and in languages."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    (own,) = openings(tokenizer, [], [])
    assert (own.system, own.text, own.end) == ("", "<|bos|><|user|>", "<|end|>")
    found = openings(tokenizer, ["Be brief.", "Be kind."], ["French", "Dutch"])
    assert [each.system for each in found] == ["Be brief.", "Be brief.", "Be kind.", "Be kind."]
    assert "Be kind. The user writes in Dutch.<|end|><|user|>" in found[3].text
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    assert openings(tokenizer, [], [])[0].text.endswith("[INST]") and openings(tokenizer, [], [])[0].end == "[/INST]"
    for template in ("{{ raise_exception('no') }}", "{{ messages[0]['content'] }}", "nothing of the user"):
        tokenizer.chat_template = template
        with pytest.raises(ToolError, match="the target's chat template"):
            openings(tokenizer, [], [])


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"none.jsonl cannot be read"):
        write_prompts(Data(prompts=[str(tmp_path / "none.jsonl")]), tmp_path / "out.jsonl")
    with pytest.raises(ToolError, match="no prompt is left"):
        written(tmp_path, [{"answer": "x"}])
