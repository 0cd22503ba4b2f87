"""``peagle-vllm diagnose``."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle_tools.shared import terminal
from peagle_tools.shared.terminal import EngineOption, JsonOption, fail, one_line_errors

if TYPE_CHECKING:
    from peagle_tools.diagnose.search import Diagnosis


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
        Path | None, typer.Option(metavar="FILE", help="Prompts: text or JSON lines, docs/bench.md.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", "-k", metavar="K", min=1, help="Draft tokens a step.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(metavar="N", min=1, help="How many prompts, from the first on.")] = 24,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The longest answer, in tokens.")] = 128,
    engine: EngineOption = "{}",
    as_json: JsonOption = False,
) -> None:
    """Why is acceptance low? Compare the head with its target, measure both in vLLM, and change one thing at a time.

    A cause is named only when its change raised the acceptance length beyond noise. Progress goes to stderr.

    Exit status: 0 a usual curve; 1 the head is unfit, the curve is unusual, or a change helped; 2 something cannot be
    read or run.
    """
    from peagle_tools.shared.prompt_files import read_prompts
    from peagle_tools.shared.prompts import PROMPTS, has_template, read_tokenizer, token_ids

    with one_line_errors():
        asked = read_prompts(prompts, target) if prompts else [[{"role": "user", "content": text}] for text in PROMPTS]
    asked = asked[:num_prompts]
    if url is not None:
        from peagle_tools.diagnose.live import answers_of, explain

        with one_line_errors():
            meaning = explain(url, answers_of(url, asked, max_tokens) if prompts else [], as_json)
        raise typer.Exit(1 if meaning else 0)
    if target is None or head is None:
        fail("--target and --head are needed, or --url of a running server")
    from peagle_tools.diagnose.diagnosis_report import as_dict, console, progress, show
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
        tokenizer = read_tokenizer(target)
        ids = [token_ids(tokenizer, messages) for messages in asked]
    k = num_speculative_tokens or min(source.trained_depth or 5, 5)
    setup = setup_of(source, model, k)
    hints = list(differences(source, model, has_template(tokenizer)))
    specials = special_tokens(read_tokens(target))
    changes = partial(interventions, head=source, target=model, special_tokens=specials)
    diagnosis: Diagnosis | None = None
    try:
        pair = Pair(target, source.name, arguments)
        with terminal.logs_on_stderr(), measuring(pair, k, ids, max_tokens) as measure:
            for diagnosis, left in search(setup, measure, changes):
                print(f"{progress(diagnosis)}; {left} changes left", file=sys.stderr)
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
        show(console(), setup, diagnosis, hints)
    raise typer.Exit(1 if diagnosis.unusual or diagnosis.causes or not diagnosis.complete else 0)
