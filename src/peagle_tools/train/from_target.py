"""Prompts that the target writes itself (Magpie, arXiv 2406.08464).

After what its chat template puts before a user's words, an instruct model writes what a user might say.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from openai import APIStatusError, OpenAI, OpenAIError
from tqdm import tqdm

from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.train import serve
from peagle_tools.train.config import Config
from peagle_tools.train.lines import read_lines, write_lines
from peagle_vllm.heads.files import one_line

SENTINEL = "whattheusersays"
AT_ONCE = 64  # requests
MAX_TOKENS = 256


def opening(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before a user's words, and what it puts after them.

    Raises:
        ToolError: the template is missing, or does not render a user's words as they are.
    """
    said = [{"role": "user", "content": SENTINEL}]
    try:
        rendered = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is code of its own
        raise ToolError(f"the target's chat template fails ({one_line(error)})") from None
    before, _, after = rendered.partition(SENTINEL)
    if not before or not after.strip():
        raise ToolError("the target's chat template puts nothing before or after a user's words: give data sets")
    first = tokenizer(after.strip(), add_special_tokens=False)["input_ids"][0]
    is_token = first in tokenizer.added_tokens_decoder
    end = tokenizer.decode([first]) if is_token else after.strip().splitlines()[0]
    return before.rstrip(" "), end  # a space is part of the next token


def sampled(config: Config, file: Path) -> Iterator[dict]:
    """``data.from_target`` prompts, {messages, end}: end is "stop", or "length" or "special token".

    They are kept in ``file``, one a line, and what is there is not sampled again.

    Raises:
        OSError: the target has no tokenizer.
        ToolError: ``file`` is of another target.
        TryAgain: the server is gone; what was sampled is kept.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.target)
    begin, end = opening(tokenizer)
    rows = {row["number"]: row for row in read_lines(file, must_exist=False)}
    if any(row["after"] != begin for row in rows.values()):
        raise ToolError(f"{file}: was sampled with another chat template, of another target; remove it")
    if missing := [number for number in range(config.data.from_target) if number not in rows]:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_lines(file, rows.values())  # without a line that was cut off
        _sample(config, tokenizer, begin, end, missing, file)
        rows = {row["number"]: row for row in read_lines(file)}
    for number in range(config.data.from_target):
        row = rows[number]
        yield {"messages": [{"role": "user", "content": row["text"].strip()}], "end": row["end"]}


def _sample(config: Config, tokenizer: Any, begin: str, end: str, numbers: list[int], file: Path) -> None:
    """Let the target's server go on from ``begin`` to ``end``; each completion is appended to ``file`` at once."""
    client = OpenAI(base_url=config.data.endpoint, api_key="none", timeout=None, max_retries=0)
    ids = tokenizer(begin, add_special_tokens=False)["input_ids"]

    def ask(number: int) -> dict[str, Any]:
        choice = client.completions.create(
            model=config.target,
            prompt=ids,
            seed=config.optimizer.seed + number,
            stop=[end],
            max_tokens=MAX_TOKENS,
            extra_body={**config.data.sampling, "skip_special_tokens": False},
        ).choices[0]
        special = any(token in choice.text for token in tokenizer.all_special_tokens)
        why = "special token" if special else choice.finish_reason
        return {"number": number, "after": begin, "text": choice.text, "end": why}

    with (
        serve.running(config, config.run / "logs/prompts-server.log") as server,
        file.open("a", encoding="utf-8") as out,
        tqdm(total=len(numbers), desc="prompts", unit="prompt", mininterval=10) as progress,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        asked = [pool.submit(ask, number) for number in numbers]
        try:
            for done in as_completed(asked):
                out.write(json.dumps(done.result(), ensure_ascii=False) + "\n")
                out.flush()
                progress.update()
        except OpenAIError as error:
            if server:
                server.check_well()
            kind = ToolError if isinstance(error, APIStatusError) else TryAgain
            raise kind(f"{config.data.endpoint}: gives no prompts ({one_line(error, 300)})") from None
        finally:
            pool.shutdown(cancel_futures=True)
