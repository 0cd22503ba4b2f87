"""Prompts that the target writes itself (Magpie, arXiv 2406.08464).

After what its chat template puts before a user's words, an instruct model writes what a user might say.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

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


def opening(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before a user's words, and what comes first after them. ToolError without either."""
    messages = [{"role": "user", "content": SENTINEL}]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is code of its own
        raise ToolError(f"the target's chat template fails ({one_line(error)})") from None
    before, after = rendered.partition(SENTINEL)[::2]
    after = after.strip()
    if not before or not after:
        raise ToolError("the target's chat template puts nothing before or after a user's words: give data sets")
    first = tokenizer(after, add_special_tokens=False)["input_ids"][0]
    end = tokenizer.decode([first]) if first in tokenizer.added_tokens_decoder else after.splitlines()[0]
    return before.rstrip(" "), end  # a space is part of the next token


def sampled(config: Config, file: Path) -> Iterator[dict]:
    """``data.from_target`` prompts, {messages, end}: end is "stop", or "length" or "special token".

    They are kept in ``file``, one a line, and what is there is not sampled again. ToolError where that is of another
    target; TryAgain where the server is gone.
    """
    tokenizer, numbers = read_tokenizer(config.target), range(config.data.from_target)
    start, stop = opening(tokenizer)
    rows = {row["number"]: row for row in read_lines(file, must_exist=False)}
    if any(row["after"] != start for row in rows.values()):
        raise ToolError(f"{file}: was sampled from another target; remove it")
    if missing := [number for number in numbers if number not in rows]:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_lines(file, rows.values())  # without a line that was cut off
        _sample(config, missing, file, tokenizer, start, stop)
        rows = {row["number"]: row for row in read_lines(file)}
    for number in numbers:
        row = rows[number]
        yield {"messages": [{"role": "user", "content": row["text"].strip()}], "end": row["end"]}


def _sample(config: Config, numbers: list[int], file: Path, tokenizer: Any, start: str, stop: str) -> None:
    """Let the target's server complete the opening; each completion is appended to ``file`` at once."""
    ids = tokenizer(start, add_special_tokens=False)["input_ids"]

    def ask(number: int) -> dict[str, Any]:
        how = {"seed": config.optimizer.seed + number, "stop": [stop], **config.data.sampling}
        how |= {"max_tokens": MAX_TOKENS, "skip_special_tokens": False}
        choice = client.completions.create(model=config.target, prompt=ids, extra_body=how).choices[0]
        special = any(token in choice.text for token in tokenizer.all_special_tokens)
        end = "special token" if special else choice.finish_reason
        return {"number": number, "after": start, "text": choice.text, "end": end}

    with (
        serve.running(config, config.run / "logs/prompts-server.log") as (endpoint, _),
        openai.OpenAI(base_url=endpoint, api_key="EMPTY", timeout=None, max_retries=0) as client,
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
            raise kind(f"{endpoint}: gives no prompts ({one_line(reason, 300)})") from None
        finally:
            pool.shutdown(cancel_futures=True)
