"""``peagle-vllm diagnose``."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from peagle_tools.shared import terminal
from peagle_tools.shared.terminal import EngineOption, JsonOption, fail, one_line_errors


def diagnose(
    target: Annotated[str, typer.Option(metavar="TARGET", help="The served model: a folder or a hub id.")],
    head: Annotated[str, typer.Option(metavar="HEAD", help="The head: a folder or a hub id.")],
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts: text or JSON lines, docs/bench.md.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens", "-k", metavar="K", min=1, help="Draft tokens; as trained by default, at most 5."
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(metavar="N", min=12, help="How many prompts, from the first on.")] = 24,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The longest answer, in tokens.")] = 128,
    engine: EngineOption = "{}",
    as_json: JsonOption = False,
) -> None:
    """Why is acceptance low? Compare the head with its target, measure both in vLLM, and change one thing at a time.

    A cause is named only when its change raised the acceptance length beyond noise. Progress goes to stderr.

    Exit status: 0 a usual curve; 1 the head is unfit, the curve is unusual, or a change helped; 2 something cannot be
    read or run.
    """
    terminal.exit_on_sigterm()
    arguments = terminal.json_object(engine)
    with one_line_errors("cuda"):
        from rich.console import Console

        from peagle_tools.diagnose import diagnosis_report as report
        from peagle_tools.diagnose import engine as measuring
        from peagle_tools.diagnose import search
        from peagle_tools.diagnose.interventions import interventions, setup_of
        from peagle_tools.shared.engines import Pair, cannot_run
        from peagle_tools.shared.prompt_files import read_prompts
        from peagle_tools.shared.prompts import PROMPTS, read_tokenizer, templated
        from peagle_vllm.heads.checks import check
        from peagle_vllm.heads.files import download
        from peagle_vllm.heads.head import read_head
        from peagle_vllm.heads.target import read_target, read_tokens, special_tokens
        from peagle_vllm.serving import RefusedError

        asked = read_prompts(prompts) if prompts else [[{"role": "user", "content": text}] for text in PROMPTS]
        if len(asked) < 12:
            fail(f"{prompts}: has {len(asked)} prompts, and noise cannot be told from a gain with fewer than twelve")
        model = read_target(target)
        source = read_head(download(head))
        terminal.exit_if_unfit(check(source, model))
        tokenizer = read_tokenizer(target, trust_remote_code=arguments.get("trust_remote_code", False))
        ids = [templated(tokenizer, messages, tokenize=True) for messages in asked[:num_prompts]]
    k = num_speculative_tokens or min(source.trained_depth or 5, 5)
    setup = setup_of(source, model, k)
    changes = list(interventions(setup, source, model, special_tokens(read_tokens(target))))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # else a refusal comes without its reason
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # ``apply`` goes to vLLM's workers
    pair = Pair(target, source.name, measuring.ARGUMENTS | arguments)
    try:
        with terminal.logs_on_stderr(), pair.engine(k, ids, max_tokens) as llm:
            diagnosis = search.diagnose(partial(measuring.measure, llm, ids, max_tokens), setup, changes)
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except Exception as error:
        fail(str(cannot_run(error)))
    if as_json:
        print(json.dumps(report.as_dict(setup, diagnosis), indent=2))
    else:
        report.show(Console(markup=False, highlight=False), setup, diagnosis)  # names of tokens can have brackets
    raise typer.Exit(1 if search.irregularities(diagnosis.base.curve) or diagnosis.cause else 0)
