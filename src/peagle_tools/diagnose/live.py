"""``peagle-vllm diagnose --url``: what a running server's counters mean, without an engine of ours."""

import json
import urllib.request
from http.client import HTTPException
from typing import Any

from peagle_tools.diagnose.diagnosis_report import SCHEMA, by_place, console, curve_of, lines, show_curve, show_places
from peagle_tools.diagnose.search import FEW, falling, irregularities
from peagle_tools.shared.acceptance import Acceptance, Answer, places_of, read_metrics
from peagle_tools.shared.conversations import Messages
from peagle_tools.shared.errors import ToolError


def answers_of(url: str, asked: list[Messages], max_tokens: int) -> list[Answer]:
    """A running server's greedy answers, one after the other. ToolError where it gives none."""

    def call(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"{url.rstrip('/')}/v1/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    answers = []
    try:
        how = {"model": call("models")["data"][0]["id"], "max_tokens": max_tokens, "temperature": 0}
        how["return_token_ids"] = True
        for messages in asked:
            answer = call("chat/completions", how | {"messages": messages})
            (choice,) = answer["choices"]
            metrics = (answer.get("metrics") or {}).get("speculative_decoding")
            answers.append(Answer(answer["prompt_token_ids"], choice["token_ids"], metrics))
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        fix = "is the server up, is this its root, and has its model a chat template?"
        raise ToolError(f"{url} does not answer ({error}); {fix}") from None
    return answers


def counts_of(url: str) -> Acceptance:
    """The server's counters since it started. ToolError where it has none."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/').removesuffix('/metrics')}/metrics", timeout=10) as answer:
            counts = read_metrics(answer.read().decode())
    except (OSError, HTTPException, ValueError) as error:
        raise ToolError(f"{url}/metrics cannot be read ({error}); is the server up, and is this its root?") from None
    except ModuleNotFoundError as error:
        raise ToolError(f"{error.name} is missing, which comes with vLLM; run this where vLLM is installed") from None
    if counts is None:
        why = "it does not speculate, or has --disable-log-stats"
        raise ToolError(f"{url}/metrics has no vllm:spec_decode counters: {why}")
    return counts


def explain(url: str, answers: list[Answer], as_json: bool) -> list[str]:
    """Print a server's acceptance by position, by place where it gave ``answers``, and what is unusual in them.

    Returns:
        What is unusual, a line each.
    """
    places, counts = places_of(answers), counts_of(url)
    meaning = irregularities(counts) + falling(places.context)
    if counts.num_drafts < FEW:
        meaning.append(f"{counts.num_drafts} drafts so far, too few to judge: send it some requests")
    if as_json:
        report = {"schema": SCHEMA, "url": url, **curve_of(counts), **by_place(places), "meaning": meaning}
        print(json.dumps(report, indent=2))
        return meaning
    out = console()
    out.print(f"{url}: {counts.num_drafts} drafts since it started, of all its requests")
    show_curve(out, counts)
    show_places(out, places)
    lines(out, "unusual", meaning)
    if not meaning:
        out.print("a usual curve; nothing looks wrong", style="green")
    return meaning
