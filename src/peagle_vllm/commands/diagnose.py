"""``peagle-vllm diagnose``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from peagle_vllm.commands.common import JsonOption, conversations, exit_if_unfit, fail, json_object, one_line_errors


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
    as_json: JsonOption = False,
) -> None:
    """Why is acceptance low? Measure the pair in vLLM, and change one thing at a time where it looks wrong.

    A cause is named only when mending it raised the acceptance length by 15% or more.

    Exit status: 0 a usual curve; 1 the head is unfit, or the curve is odd; 2 something cannot be read or run.
    """
    from rich.console import Console

    from peagle_vllm.diagnose.engine import VllmMeasure
    from peagle_vllm.diagnose.interventions import interventions, setup_of
    from peagle_vllm.diagnose.prompts import PROMPTS
    from peagle_vllm.diagnose.report import as_dict, show
    from peagle_vllm.diagnose.search import diagnose as search
    from peagle_vllm.heads.checks import check
    from peagle_vllm.heads.files import download, one_line
    from peagle_vllm.heads.head import read_head
    from peagle_vllm.heads.target import read_target, read_tokens, special_tokens
    from peagle_vllm.serving import RefusedError

    asked = conversations(prompts) if prompts else [[{"role": "user", "content": text}] for text in PROMPTS]
    arguments = json_object(engine)
    with one_line_errors():
        model = read_target(target)
        source = read_head(download(head))
        exit_if_unfit(check(source, model))
        specials = special_tokens(read_tokens(target))
    k = num_speculative_tokens or min(source.trained_depth or 5, 5)
    try:
        with VllmMeasure(target, source, asked[:num_prompts], max_tokens, arguments) as measure:
            has_template = bool(getattr(measure.tokenizer, "chat_template", None))
            setup = setup_of(source, model, k, chat_template=has_template and not raw)
            longest = max(map(len, measure.prompt_ids(setup)))
            result = search(
                setup, measure, lambda base: interventions(base, source, model, specials, has_template, longest), always
            )
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
