"""The trained tiny models, and requests of held-out prompts to them."""

from collections.abc import Sequence
from typing import Any

from tests.support.engines import Finished, Request, Settings, engine, without_speculation
from tests.support.models import PEAGLE, TARGET, prompt_token_ids

K = 5
SETTINGS = Settings(TARGET, PEAGLE, k=K, llm=(("skip_tokenizer_init", False),))


def ask(prompt: int = 0, max_tokens: int = 24, **sampling: Any) -> Request:
    """A request for one of the prompts: greedy, past the end of text, unless told."""
    name = f"{prompt}, {max_tokens}, {sampling}"
    parameters = {"detokenize": True} | sampling
    return Request(name, tuple(prompt_token_ids()[prompt]), max_tokens, sampling=tuple(parameters.items()))


def both(settings: Settings, requests: Sequence[Request]) -> list[tuple[Finished, Finished]]:
    """(unspeculated, speculated) answer of each request."""
    plain, speculated = without_speculation(settings, requests), engine(settings).run(requests)
    return [(plain[request.id], speculated[request.id]) for request in requests]
