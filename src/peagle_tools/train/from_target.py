"""Prompts that the target writes itself (Magpie, arXiv 2406.08464).

After what its chat template puts before a user's words, an instruct model writes what a user might say.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import openai
from tqdm import tqdm

from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.shared.prompts import read_tokenizer
from peagle_tools.train import serve
from peagle_tools.train.lines import add_line, read_lines, write_lines
from peagle_tools.train.peagle_yaml import Config
from peagle_vllm.heads.files import one_line

SENTINEL = "whattheusersays"
MAX_TOKENS = 256
SPEAKS = "The user writes in {}."


class Opening(NamedTuple):
    """What stands before a user's words."""

    system: str  # the system prompt that was given, or ""; it stays with the prompt
    text: str  # rendered by the chat template
    end: str  # what the template puts after the words


def openings(tokenizer: Any, systems: list[str], languages: list[str]) -> list[Opening]:
    """One for each system prompt and language; without either the template's own.

    Raises:
        ToolError: the template is missing, or does not render a user's words as they are.
    """
    found = []
    for system, language in product(systems or ("",), languages or ("",)):
        said = " ".join(filter(None, (system, SPEAKS.format(language) if language else "")))
        messages = [{"role": "system", "content": said}] if said else []
        messages.append({"role": "user", "content": SENTINEL})
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is code of its own
            raise ToolError(f"the target's chat template fails ({one_line(error)})") from None
        before, _, after = rendered.partition(SENTINEL)
        if not before or not after.strip():
            raise ToolError("the target's chat template puts nothing before or after a user's words: give data sets")
        first = tokenizer(after.strip(), add_special_tokens=False)["input_ids"][0]
        is_token = first in tokenizer.added_tokens_decoder
        end = tokenizer.decode([first]) if is_token else after.strip().splitlines()[0]
        found.append(Opening(system, before.rstrip(" "), end))  # a space is part of the next token
    return found


def sampled(config: Config, file: Path) -> Iterator[dict]:
    """``data.from_target`` prompts, {messages, end}: end is "stop", or "length" or "special token".

    They are kept in ``file``, one a line, and what is there is not sampled again.

    Raises:
        ToolError: ``file`` is of another target, or of other system prompts.
        TryAgain: the server is gone; what was sampled is kept.
    """
    tokenizer, number = read_tokenizer(config.target), config.data.from_target
    kinds = openings(tokenizer, config.data.systems, config.data.languages)
    rows = {row["number"]: row for row in read_lines(file, must_exist=False)}
    if any(row["after"] != kinds[each % len(kinds)].text for each, row in rows.items()):
        raise ToolError(f"{file}: was sampled after other system prompts, or from another target; remove it")
    if missing := [each for each in range(number) if each not in rows]:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_lines(file, rows.values())  # without a line that was cut off
        _sample(config, tokenizer, kinds, missing, file)
        rows = {row["number"]: row for row in read_lines(file)}
    for each in range(number):
        system = kinds[each % len(kinds)].system
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": rows[each]["text"].strip()})
        yield {"messages": messages, "end": rows[each]["end"]}


def _sample(config: Config, tokenizer: Any, kinds: list[Opening], numbers: list[int], file: Path) -> None:
    """Let the target's server complete the openings; each completion is appended to ``file`` at once."""
    client = openai.OpenAI(base_url=config.data.endpoint, api_key="EMPTY", timeout=None, max_retries=0)

    def ask(number: int) -> dict[str, Any]:
        kind = kinds[number % len(kinds)]
        ids = tokenizer(kind.text, add_special_tokens=False)["input_ids"]
        seed = config.optimizer.seed + number
        how = {"seed": seed, "stop": [kind.end], **config.data.sampling}
        how |= {"max_tokens": MAX_TOKENS, "skip_special_tokens": False}
        choice = client.completions.create(model=config.target, prompt=ids, extra_body=how).choices[0]
        special = any(token in choice.text for token in tokenizer.all_special_tokens)
        end = "special token" if special else choice.finish_reason
        return {"number": number, "after": kind.text, "text": choice.text, "end": end}

    with (
        serve.running(config, config.run / "logs/prompts-server.log"),
        tqdm(total=len(numbers), desc="prompts", unit="prompt", mininterval=10) as progress,
        ThreadPoolExecutor(config.data.concurrency) as pool,
    ):
        asked = [pool.submit(ask, number) for number in numbers]
        try:
            for done in as_completed(asked):
                add_line(file, done.result())
                progress.update()
        except openai.APIError as error:
            is_refused = isinstance(error, openai.APIStatusError)
            kind, reason = (ToolError, error) if is_refused else (TryAgain, error.__cause__ or error)
            raise kind(f"{config.data.endpoint}: gives no prompts ({one_line(reason, 300)})") from None
        finally:
            pool.shutdown(cancel_futures=True)
