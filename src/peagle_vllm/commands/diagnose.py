"""``peagle-vllm diagnose``."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle_vllm.commands.common import fail, one_line_errors

if TYPE_CHECKING:
    from peagle_vllm.diagnose.engine import Messages
    from peagle_vllm.heads.head import Head
    from peagle_vllm.heads.target import Target


def diagnose(
    target: Annotated[str, typer.Option(metavar="TARGET", help="The served model: a folder or a hub id.")],
    head: Annotated[str, typer.Option(metavar="HEAD", help="The head: a folder or a hub id.")],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Prompts, one a line: text, {"prompt": ...} or {"messages": ...}.'),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", "-k", metavar="K", min=1, help="Draft tokens a step.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send prompts without the chat template.")] = False,
    num_prompts: Annotated[int, typer.Option(metavar="N", min=1, help="How many prompts, from the first on.")] = 8,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The longest answer, in tokens.")] = 128,
    always: Annotated[bool, typer.Option("--always", help="Intervene even where the curve looks usual.")] = False,
    engine: Annotated[
        str, typer.Option(metavar="JSON", help='More arguments for vLLM\'s LLM, such as {"tensor_parallel_size": 2}.')
    ] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; docs/heads.md documents its fields.")] = False,
) -> None:
    """Why is acceptance low? Measure the pair in vLLM, and change one thing at a time where it looks wrong.

    A cause is named only when mending it raised the acceptance length by 15% or more.

    Exit status: 0 a usual curve; 1 the head is unfit, or the curve is odd; 2 something cannot be read or run.
    """
    from rich.console import Console

    from peagle_vllm.diagnose.engine import VllmMeasure
    from peagle_vllm.diagnose.interventions import Known, interventions, setup_of
    from peagle_vllm.diagnose.report import as_dict, show
    from peagle_vllm.diagnose.search import diagnose as search
    from peagle_vllm.heads.files import one_line
    from peagle_vllm.heads.target import TargetFiles
    from peagle_vllm.serving import RefusedError

    conversations = _prompts(prompts)[:num_prompts]
    arguments = _engine_arguments(engine)
    with one_line_errors():
        files = TargetFiles(target)
        model = files.target()
        found = _fit_head(head, model)
        specials = tuple(files.special_tokens())
    k = num_speculative_tokens or min(found.trained_depth or 5, 5)
    try:
        with VllmMeasure(target, found, conversations, max_tokens, arguments) as measure:
            has_template = bool(getattr(measure.tokenizer, "chat_template", None))
            setup = setup_of(found, model, k, chat_template=has_template and not raw)
            longest = max(map(len, measure.prompt_ids(setup)))
            known = Known(found, model, specials, has_template, longest)
            result = search(setup, measure, lambda changed: interventions(changed, known), always)
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except Exception as error:
        fail(f"vLLM cannot run this pair ({one_line(error, 300)}); serve the target alone first, then with this head")
    if as_json:
        print(json.dumps(as_dict(setup, result), indent=2))
    else:
        show(Console(), setup, result)
    raise typer.Exit(1 if result.odd else 0)


def _prompts(path: Path | None) -> "list[Messages]":
    from peagle_vllm.diagnose.engine import read_prompts
    from peagle_vllm.diagnose.prompts import PROMPTS

    if path is None:
        return [[{"role": "user", "content": text}] for text in PROMPTS]
    try:
        return read_prompts(path)
    except OSError as error:
        fail(f"{path} cannot be read ({error.strerror})")
    except ValueError as error:
        fail(str(error))


def _engine_arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        fail('--engine is no JSON object; write it as {"tensor_parallel_size": 2}')
    return arguments


def _fit_head(name: str, target: "Target") -> "Head":
    """The head, or an end with the lines that ``inspect`` prints."""
    from peagle_vllm.heads.checks import check_pair
    from peagle_vllm.heads.files import download
    from peagle_vllm.heads.head import read_head

    head = read_head(download(name))
    problems = check_pair(head, target)
    for problem in problems:
        print(f"{problem.severity}: {problem.line}", file=sys.stderr)
    if any(problem.severity == "error" for problem in problems):
        raise typer.Exit(1)
    return head
