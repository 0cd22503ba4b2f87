"""The served model, as far as a head must fit it: its sizes, and what its tokenizer calls the mask token.

Reads config.json and the tokenizer's JSON files; no weights, no code of the model.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from peagle_vllm.heads.config import is_whole, size
from peagle_vllm.heads.files import HeadError, hub_failure, read_json

SIZES = {"hidden_size", "vocab_size", "num_hidden_layers"}
MASK_WORDS = ("mask", "pard", "draft", "reserved", "unused", "pad", "unk")


@dataclass(frozen=True)
class Target:
    """What a head must fit: the served model, by vLLM's own reading of its config."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    tokenizer: str | None = None  # where its tokenizer's files are; None: with the model's
    config: Mapping[str, Any] = field(default_factory=dict)  # of its text model, where that was read


class Token(NamedTuple):
    """A token id in the target's tokenizer."""

    id: int
    text: str | None  # as the tokenizer has it; None where it has no such id (padding of the vocabulary)
    # "special" (added, in no text), "in use" (special, and in the chat template or an end of text), "ordinary" (text is
    # made of it), or "unused"
    kind: Literal["special", "in use", "ordinary", "unused"]


def read_target(model: str) -> Target:
    """Read the sizes of a target, from a folder, the hub's cache or the hub. HeadError where one is missing."""
    try:
        config, file = read_json(_path(model, "config.json")), f"{model}/config.json"
        if "speculators_model_type" in config:
            raise HeadError(f"{model} is a head, not a target; name the served model")
        nested = config.get("text_config") or config.get("llm_config")
        text = nested if isinstance(nested, dict) else config
        if SIZES - text.keys():  # those of LLaVA and Gemma 3 are their classes' defaults
            with suppress(Exception):
                from transformers import AutoConfig

                whole = AutoConfig.from_pretrained(_path(model, "config.json"), trust_remote_code=False)
                text = whole.get_text_config().to_dict() | text
        return Target(
            name=model,
            hidden_size=size(text, "hidden_size", file),
            vocab_size=size(text, "vocab_size", file),
            num_layers=size(text, "num_hidden_layers", file),
            config=text,
        )
    except HeadError as error:
        raise HeadError(f"target: {error}") from None


def read_tokens(model: str) -> dict[int, Token]:
    """The tokens of a target by their ids; empty where it has no tokenizer.json that can be read."""
    tokenizer = _json_or_empty(model, "tokenizer.json")
    try:
        vocab = (tokenizer.get("model") or {}).get("vocab") or {}
        texts = {i: t for t, i in vocab.items()} if isinstance(vocab, dict) else {i: e[0] for i, e in enumerate(vocab)}
        added = {entry["id"]: str(entry["content"]) for entry in tokenizer.get("added_tokens") or []}
    except (AttributeError, IndexError, KeyError, TypeError):
        return {}
    template = str(_json_or_empty(model, "tokenizer_config.json").get("chat_template", ""))
    with suppress(HeadError, OSError, ValueError):  # transformers reads it from either file
        template += _path(model, "chat_template.jinja").read_text(encoding="utf-8")
    configs = [_json_or_empty(model, file) for file in ("config.json", "generation_config.json")]
    values = [config.get(key) for config in configs for key in ("bos_token_id", "eos_token_id")]
    ends = [end for value in values for end in (value if isinstance(value, list) else [value])]
    tokens = {i: Token(i, str(text), "ordinary") for i, text in texts.items()}
    for i, text in added.items():
        tokens[i] = Token(i, text, "in use" if i in ends or (text and text in template) else "special")
    return tokens


def find_token(tokens: dict[int, Token], token_id: object) -> Token | None:
    """What the tokenizer calls an id; None where there is no tokenizer, or ``token_id`` is no whole number."""
    return tokens.get(token_id, Token(token_id, None, "unused")) if tokens and is_whole(token_id) else None


def special_tokens(tokens: dict[int, Token]) -> list[Token]:
    """The tokens that no text and no chat template uses, the likely mask tokens first."""

    def rank(token: Token) -> tuple[int, int]:
        text = (token.text or "").lower()
        return next((i for i, word in enumerate(MASK_WORDS) if word in text), len(MASK_WORDS)), token.id

    return sorted((token for token in tokens.values() if token.kind == "special"), key=rank)


def _path(model: str, file: str) -> Path:
    if Path(model).is_dir():
        return Path(model) / file
    if Path(model).exists():
        raise HeadError(f"{model} is a file; name its folder")
    try:
        import huggingface_hub as hub

        return Path(hub.hf_hub_download(model, file))
    except Exception as error:
        raise HeadError(f"{model} is not a folder, and {hub_failure(error, file)}") from None


def _json_or_empty(model: str, file: str) -> dict[str, Any]:
    try:
        return read_json(_path(model, file))
    except HeadError:
        return {}
