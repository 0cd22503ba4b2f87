"""The served model, as far as a head must fit it: its sizes, and what its tokenizer calls the mask token.

Reads config.json and the tokenizer's JSON files; no weights, no code of the model.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from peagle_vllm.heads.config import is_whole, positive
from peagle_vllm.heads.files import HeadError, one_line, read_json


@dataclass(frozen=True)
class Target:
    """What a head must fit: the served model, by vLLM's own reading of its config."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True)
class Token:
    """A token id in the target's tokenizer.

    Attributes:
        text: as the tokenizer has it; None where it has no such id (padding of the vocabulary).
        kind: "special" (added, in no text), "in use" (special, and in the chat template or an end of text),
            "ordinary" (text is made of it), or "unused".
    """

    id: int
    text: str | None
    kind: Literal["special", "in use", "ordinary", "unused"]


class TargetFiles:
    """The small files of a target, from a folder, the hub's cache or the hub.

    Raises:
        HeadError: in every method, where a file that is needed cannot be had.
    """

    def __init__(self, model: str, revision: str | None = None):
        self.model, self.revision = model, revision

    def target(self) -> Target:
        config = read_json(self._path("config.json"))
        nested = config.get("text_config")
        text = nested if isinstance(nested, dict) else config
        file = f"{self.model}/config.json"
        return Target(
            name=self.model,
            hidden_size=positive(text, "hidden_size", file),
            vocab_size=positive(text, "vocab_size", file),
            num_layers=positive(text, "num_hidden_layers", file),
        )

    def token(self, token_id: object) -> Token | None:
        """What the tokenizer calls an id; None where there is no tokenizer.json, and for what is no whole number."""
        if not self._tokenizer or not is_whole(token_id):
            return None
        if token_id in self._added_tokens:
            text = self._added_tokens[token_id]
            return Token(token_id, text, "in use" if self._in_use(token_id, text) else "special")
        model = self._tokenizer.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocab, dict):
            for text, number in vocab.items():
                if number == token_id:
                    return Token(token_id, text, "ordinary")
        if isinstance(vocab, list) and token_id < len(vocab) and isinstance(vocab[token_id], list):
            return Token(token_id, str(vocab[token_id][0]), "ordinary")
        return Token(token_id, None, "unused")

    def special_tokens(self) -> list[Token]:
        """The tokens that no text and no chat template uses, the likely mask tokens first."""
        words = ("mask", "pard", "draft", "reserved", "unused", "pad", "unk")

        def rank(token: Token) -> tuple[int, int]:
            text = (token.text or "").lower()
            return next((i for i, word in enumerate(words) if word in text), len(words)), token.id

        added = self._added_tokens.items()
        return sorted((Token(i, text, "special") for i, text in added if not self._in_use(i, text)), key=rank)

    def _path(self, file: str) -> Path:
        if Path(self.model).is_dir():
            return Path(self.model) / file
        try:
            import huggingface_hub as hub

            return Path(hub.hf_hub_download(self.model, file, revision=self.revision))
        except Exception as error:
            raise HeadError(
                f"{self.model} is no folder, and the hub gives no {file} ({one_line(error)}); name the target's folder "
                "or its hub id"
            ) from None

    def _json_or_empty(self, file: str) -> dict[str, Any]:
        try:
            return read_json(self._path(file))
        except HeadError:
            return {}

    @cached_property
    def _tokenizer(self) -> dict[str, Any]:
        return self._json_or_empty("tokenizer.json")

    @cached_property
    def _added_tokens(self) -> dict[int, str]:
        added = self._tokenizer.get("added_tokens")
        entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
        return {entry["id"]: str(entry.get("content")) for entry in entries if is_whole(entry.get("id"))}

    @cached_property
    def _ends(self) -> list[Any]:
        """The ids that begin and end a text."""
        configs = [self._json_or_empty(file) for file in ("config.json", "generation_config.json")]
        values = [config.get(key) for config in configs for key in ("bos_token_id", "eos_token_id")]
        return [token_id for value in values for token_id in (value if isinstance(value, list) else [value])]

    @cached_property
    def _chat_template(self) -> str:
        """From either of the places that transformers knows; empty where there is none."""
        try:
            own_file = self._path("chat_template.jinja").read_text(encoding="utf-8")
        except (HeadError, OSError, ValueError):
            own_file = ""
        return str(self._json_or_empty("tokenizer_config.json").get("chat_template", "")) + own_file

    def _in_use(self, token_id: int, text: str) -> bool:
        return token_id in self._ends or bool(text and text in self._chat_template)


def mask_token_fault(token: Token | None, place: str) -> str | None:
    """A warning where the mask token is one that the target reads and writes."""
    if token is None or token.kind in ("special", "unused"):
        return None
    return (
        f"the mask token {token.id} is {token.text!r}, which the target's own text uses: {place}; right only if the "
        "head was trained so"
    )
