"""``peagle-vllm bench init``: a suite for one pair, from suite.yaml; ``tune`` measures the same one."""

import json
import os
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated

import typer

from peagle_tools.shared.terminal import (
    HeadArgument,
    check_extra,
    conversations,
    exit_if_unfit,
    fail,
    one_line_errors,
)

if TYPE_CHECKING:
    from peagle_tools.bench.suite import Suite

TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help="The served model: a folder or a hub id.")]
PromptsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help='Your prompts, one a line: text or {"prompt": ...}. Without it MT-Bench.'),
]
KOption = Annotated[
    list[int] | None, typer.Option("--k", min=1, help="A depth; may be given often. Without it 3, 5, 7, as trained.")
]
ConcurrencyOption = Annotated[list[int] | None, typer.Option(min=1, help="As you serve; may be given often: 1, 8.")]
ServeOption = Annotated[str, typer.Option(metavar="FLAGS", help="Flags of `vllm serve`, word for word, in quotes.")]
TokensOption = Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="The longest answer, in tokens.")]
SERVE, MAX_TOKENS = "--no-enable-prefix-caching", 256
MOST_PROMPTS = 80
ARM, DATASET = "P-EAGLE", "prompts"  # as suite.yaml names them


def init(
    target: TargetArgument,
    head: HeadArgument,
    prompts: PromptsOption = None,
    k: KOption = None,
    concurrency: ConcurrencyOption = None,
    serve: ServeOption = SERVE,
    max_tokens: TokensOption = MAX_TOKENS,
    out: Annotated[
        Path | None, typer.Option(metavar="SUITE.yaml", help="What to write; without it the head's name .yaml.")
    ] = None,
) -> None:
    """Write a suite for a target and its head: YAML to read, edit and run. Overwrites nothing.

    Exit status: 0 written; 1 the head does not fit; 2 unusable input.
    """
    check_extra()
    from peagle_tools.bench import BenchError

    file = out or Path(f"{name_of(head)}.yaml")
    files = suite_files(file, target, head, prompts, k, concurrency, serve, max_tokens)
    if there := [path for path in files if path.exists()]:
        fail(f"{there[0]} exists; name another file with --out, nothing is overwritten")
    try:
        suite = write_suite(files)
    except BenchError as error:
        fail(str(error))
    print(f"{' and '.join(map(str, files))}: {data_used(suite, prompts)}\nNext: peagle-vllm bench run {file}")


def name_of(head: str) -> str:
    """A head's name as part of file names."""
    from peagle_tools.bench.suite import slug

    return slug(Path(head).resolve().name) or "suite"


def data_used(suite: "Suite", prompts: Path | None) -> str:
    source = f"prompts of {prompts}" if prompts else "no --prompts, so MT-Bench from the hub"
    return f"{source}, at least {suite.datasets[DATASET].prompts} requests a cell"


def suite_files(
    file: Path,
    target: str,
    head: str,
    prompts: Path | None,
    k: list[int] | None,
    concurrency: list[int] | None,
    serve: str,
    max_tokens: int,
) -> dict[Path, str]:
    """What to write: the suite ``file``, then its prompts beside it.

    The command ends with a line where target, head or prompts cannot be read, or do not fit each other.
    """
    from peagle_vllm.heads.checks import check
    from peagle_vllm.heads.files import find
    from peagle_vllm.heads.head import read_head
    from peagle_vllm.heads.target import read_target

    lines = _prompt_lines(prompts) if prompts else []
    with one_line_errors():
        source = read_head(find(head))
        exit_if_unfit(check(source, read_target(target)))
    deepest, data = source.trained_depth or 7, file.with_suffix(".jsonl")
    config = {"method": "eagle3", "model": _as_in_suite(head, file.parent), "parallel_drafting": True}
    text = Template(Path(__file__).with_name("suite.yaml").read_text()).substitute(
        name=name_of(head),
        target=json.dumps(_as_in_suite(target, file.parent)),
        flags=json.dumps(serve),
        config=json.dumps(config),
        k=k or [depth for depth in (3, 5, 7) if depth <= deepest] or [deepest],
        source=f"jsonl: {json.dumps(f'./{data.name}')}" if lines else "hub: mt-bench # your own: jsonl: ./FILE.jsonl",
        prompts=min(len(lines) or MOST_PROMPTS, MOST_PROMPTS),
        max_tokens=max_tokens,
        concurrency=concurrency or [1, 8],
    )
    return {file: text} | ({data: "".join(lines)} if lines else {})


def write_suite(files: dict[Path, str]) -> "Suite":
    """Write ``suite_files``; none is left where they make no suite.

    Raises:
        BenchError: an option made no suite, or a file cannot be written.
    """
    from peagle_tools.bench import BenchError
    from peagle_tools.bench.suite import read_suite

    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read_suite(next(iter(files)))
    except OSError as error:
        raise BenchError(f"{error.filename}: cannot be written ({error.strerror})") from None
    except BenchError:
        for path in files:
            path.unlink()
        raise


def _prompt_lines(prompts: Path) -> list[str]:
    """Each prompt as the line that `vllm bench serve` reads."""
    asked = conversations(prompts)
    for n, messages in enumerate(asked, start=1):
        if [message["role"] for message in messages] != ["user"]:
            fail(f'{prompts}: prompt {n} is a conversation, a sweep sends single prompts; write {{"prompt": ...}}')
    return [json.dumps({"prompt": messages[0]["content"]}) + "\n" for messages in asked]


def _as_in_suite(model: str, folder: Path) -> str:
    """A folder as a suite in ``folder`` names it; a hub id as it is."""
    if not Path(model).is_dir():
        return model
    path = os.path.relpath(model, folder)
    return path if path.startswith("../") else f"./{path}"
