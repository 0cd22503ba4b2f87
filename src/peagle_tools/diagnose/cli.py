"""``peagle-vllm diagnose``."""

import json
import sys
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle_tools.shared import terminal
from peagle_tools.shared.terminal import JsonOption, fail, one_line_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peagle_tools.diagnose.interventions import Intervention, Setup
    from peagle_tools.diagnose.search import Diagnosis
    from peagle_tools.shared.acceptance import Answer
    from peagle_tools.shared.conversations import Messages


def diagnose(
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="The served model: a folder or a hub id.")
    ] = None,
    head: Annotated[str | None, typer.Option(metavar="HEAD", help="The head: a folder or a hub id.")] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Read the metrics of this running server instead; with --prompts, after answering them."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts: text, JSON lines or a table, docs/bench.md."),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", "-k", metavar="K", min=1, help="Draft tokens a step.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send prompts without the chat template.")] = False,
    num_prompts: Annotated[int, typer.Option(metavar="N", min=1, help="How many prompts, from the first on.")] = 24,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The longest answer, in tokens.")] = 128,
    engine: Annotated[
        str, typer.Option(metavar="JSON", help='More arguments for vLLM\'s LLM, such as {"tensor_parallel_size": 2}.')
    ] = "{}",
    as_json: JsonOption = False,
) -> None:
    """Why is acceptance low? Compare the head with its target, measure both in vLLM, and change one thing at a time.

    A cause is named only when its change raised the acceptance length beyond noise. Progress goes to stderr.

    Exit status: 0 a usual curve; 1 the head is unfit, the curve is unusual, or a change helped; 2 something cannot be
    read or run.
    """
    from peagle_tools.shared.prompt_files import read_prompts
    from peagle_tools.shared.prompts import PROMPTS, read_tokenizer, token_ids

    with one_line_errors():
        asked = read_prompts(prompts, target) if prompts else [[{"role": "user", "content": text}] for text in PROMPTS]
    asked = asked[:num_prompts]
    if url is not None:
        _live(url, as_json, _answers(url, asked, max_tokens, raw) if prompts else [])
        return
    if target is None or head is None:
        fail("--target and --head are needed, or --url of a running server")
    from rich.console import Console

    from peagle_tools.diagnose.diagnosis_report import as_dict, show
    from peagle_tools.diagnose.engine import measuring
    from peagle_tools.diagnose.interventions import differences, interventions, setup_of
    from peagle_tools.diagnose.search import diagnose as search
    from peagle_tools.shared.engines import Pair, cannot_run
    from peagle_vllm.heads.checks import check
    from peagle_vllm.heads.files import download
    from peagle_vllm.heads.head import read_head
    from peagle_vllm.heads.target import read_target, read_tokens, special_tokens
    from peagle_vllm.serving import RefusedError

    terminal.exit_on_sigterm()
    arguments = terminal.json_object(engine)
    with one_line_errors():
        model = read_target(target)
        source = read_head(download(head))
        terminal.exit_if_unfit(check(source, model))
        specials, tokenizer = special_tokens(read_tokens(target)), read_tokenizer(target)
        has_template = bool(getattr(tokenizer, "chat_template", None))
        forms = {form: [token_ids(tokenizer, messages, form) for messages in asked] for form in {False, has_template}}
    k = num_speculative_tokens or min(source.trained_depth or 5, 5)
    setup = setup_of(source, model, k, chat_template=has_template and not raw)
    hints = list(differences(setup, source, model, has_template))
    diagnosis: Diagnosis | None = None
    try:
        pair = Pair(target, source.name, arguments)
        with terminal.logs_on_stderr(), measuring(pair, k, forms, max_tokens) as measure:

            def propose(base: "Setup") -> "Iterator[Intervention]":
                return interventions(base, source, model, specials, has_template)

            began = 0.0
            for diagnosis, left in search(setup, measure, propose):
                began = began or time.monotonic()
                _say(diagnosis, left, time.monotonic() - began)
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if diagnosis is None:
            raise
    except Exception as error:
        fail(str(cannot_run(error)))
    assert diagnosis is not None  # the setup itself was measured
    if as_json:
        print(json.dumps(as_dict(setup, diagnosis, hints), indent=2))
    else:
        show(Console(), setup, diagnosis, hints)
    raise typer.Exit(1 if diagnosis.unusual or diagnosis.causes or not diagnosis.complete else 0)


def _say(diagnosis: "Diagnosis", left: int, seconds: float) -> None:
    """A line on stderr for each measurement; ``seconds`` is what all trials took so far."""
    line = f"acceptance length {diagnosis.curve.length:.2f}; {left} changes left"
    if diagnosis.trials:
        trial = diagnosis.trials[-1]
        lengths = f"{trial.before.length:.2f} -> {trial.after.length:.2f}"
        line = f"{trial.intervention.change}: {lengths}; {left} changes left"
        line += f", about {seconds / len(diagnosis.trials) * left:.0f} s"
    print(line, file=sys.stderr)


def _answers(url: str, asked: "list[Messages]", max_tokens: int, raw: bool) -> "list[Answer]":
    """A running server's greedy answers, one after the other."""
    from peagle_tools.shared.acceptance import Answer

    def call(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"{url.rstrip('/')}/v1/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    answers = []
    try:
        how = {"model": call("models")["data"][0]["id"], "max_tokens": max_tokens, "temperature": 0}
        how |= {"return_token_ids": True}
        for messages in asked:
            text = {"prompt": "\n".join(message["content"] for message in messages)}
            answer = call("completions", how | text) if raw else call("chat/completions", how | {"messages": messages})
            metrics, (choice,) = answer.get("metrics") or {}, answer["choices"]
            prompt = (choice if raw else answer)["prompt_token_ids"]
            answers.append(Answer(prompt, choice["token_ids"], metrics.get("speculative_decoding")))
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        fail(f"{url} does not answer ({error}); is the server up, and is this its root?")
    return answers


def _live(url: str, as_json: bool, answers: "list[Answer]") -> None:
    """What a running server's counters mean: vLLM's acceptance by position, and by place where it gave ``answers``."""
    from rich.console import Console

    from peagle_tools.diagnose.diagnosis_report import SCHEMA, by_place, curve_of, lines, show_curve, show_places
    from peagle_tools.diagnose.search import FEW, falling, irregularities
    from peagle_tools.shared.acceptance import places_of, read_metrics

    with one_line_errors():
        places = places_of(answers)
    try:
        with urllib.request.urlopen(f"{url.rstrip('/').removesuffix('/metrics')}/metrics", timeout=10) as answer:
            seen = read_metrics(answer.read().decode())
    except (OSError, HTTPException, ValueError) as error:
        fail(f"{url}/metrics cannot be read ({error}); is the server up, and is this its root?")
    except ModuleNotFoundError as error:
        fail(f"{error.name} is missing, which comes with vLLM; run this where vLLM is installed")
    if seen is None:
        fail(f"{url}/metrics has no vllm:spec_decode counters: it does not speculate, or has --disable-log-stats")
    meaning = irregularities(seen) + falling(places.context)
    if seen.num_drafts < FEW:
        meaning.append(f"{seen.num_drafts} drafts so far, too few to judge: send it some requests")
    if as_json:
        report = {"schema": SCHEMA, "url": url, **curve_of(seen), **by_place(places), "meaning": meaning}
        print(json.dumps(report, indent=2))
    else:
        console = Console()
        console.print(f"{url}: {seen.num_drafts} drafts since it started, of all its requests", highlight=False)
        show_curve(console, seen)
        show_places(console, places)
        lines(console, "unusual", meaning)
        if not meaning:
            console.print("a usual curve; nothing looks wrong", style="green")
    raise typer.Exit(1 if meaning else 0)
