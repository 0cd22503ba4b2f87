"""``peagle-vllm tune``: a short sweep on the user's own prompts, and the config that follows from it."""

from pathlib import Path
from typing import Annotated

import typer

from peagle_tools.bench.cli import DEFAULT, show_report, sweeping
from peagle_tools.shared.atomic_files import write_whole
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.terminal import HeadArgument, check_extra, exit_if_unfit, fail

MOST_PROMPTS = 80
HEADER = "# `bench run` measures a copy of this that you edit; docs/bench.md explains the keys.\n"


def tune(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The served model: a folder or a hub id.")],
    head: HeadArgument,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts: text or JSON lines, docs/bench.md. Without it MT-Bench."),
    ] = None,
    k: Annotated[
        list[int] | None, typer.Option(min=1, help="A depth; may be given often. Without it 3, 5, 7, as trained.")
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="As you serve; may be given often. Without it 1, 8.")
    ] = None,
    serve: Annotated[
        str, typer.Option(metavar="FLAGS", help="Flags of `vllm serve` in place of these, paths absolute.")
    ] = "--no-enable-prefix-caching",
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The longest answer, in tokens.")] = 256,
    results: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where results go; without it bench-results/tune-HEAD.")
    ] = None,
) -> None:
    """Which K to serve on your prompts, and what it gains: a short sweep, then the whole speculative config.

    The suite that is measured is FOLDER/suite.yaml: copy it, add arms or data sets, and `bench run` the copy.

    Exit status: 0 measured; 1 the head does not fit; 2 unusable input, or a cell failed; 130 interrupted.
    """
    check_extra("vllm", *(["datasets"] if prompts is None else []))
    import yaml
    from pydantic import ValidationError

    from peagle_tools.bench.cells import grid
    from peagle_tools.bench.suite import Suite, slug
    from peagle_tools.bench.sweep import Sweep
    from peagle_tools.shared.prompt_files import read_prompts
    from peagle_vllm.heads.checks import check
    from peagle_vllm.heads.files import find
    from peagle_vllm.heads.head import read_head
    from peagle_vllm.heads.target import read_target

    name = slug(Path(head).resolve().name) or "suite"
    folder = results or DEFAULT / f"tune-{name}"
    with sweeping():
        most = min(MOST_PROMPTS, len(read_prompts(prompts))) if prompts else MOST_PROMPTS
        checked = read_head(find(head))
        exit_if_unfit(check(checked, read_target(target)))
        deepest = checked.trained_depth or 7
        depths = k or [depth for depth in (3, 5, 7) if depth <= deepest] or [deepest]
        config = {"method": "eagle3", "model": _absolute(head), "parallel_drafting": True}
        source = {"jsonl": _absolute(str(prompts))} if prompts else {"hub": "mt-bench"}
        written = {
            "name": name,
            "target": _absolute(target),
            "serve": {"flags": serve},
            "arms": {"none": {}, "P-EAGLE": {"speculative_config": config, "k": depths}},
            "datasets": {"prompts": source | {"prompts": most, "prompts_per_client": 4, "output_tokens": max_tokens}},
            "concurrency": concurrency or [1, 8],
            "repeats": 3,  # one repeat shows no noise
        }
        try:
            suite = Suite.model_validate(written)
        except ValidationError as error:
            fail(f"--serve: {error.errors()[0]['msg'].removeprefix('Value error, ')}")
        file, text = folder / "suite.yaml", HEADER + yaml.safe_dump(written, sort_keys=False)
        if file.read_text() != text if file.exists() else (folder / "sweep.json").exists():
            raise ToolError(f"{folder} holds a suite or results of other options; name another folder with --results")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
        which = f"prompts of {prompts}" if prompts else "no --prompts, so MT-Bench from the hub"
        cells = grid(suite)
        print(f"tune: {which}; {len(cells)} cells of at least {most} requests; suite and results are in {folder}")
        if failed := Sweep(suite, folder, folder, cells).run():
            fail(f"{failed} cells failed; the lines above give the reasons")
        show_report(folder)


def _absolute(name: str) -> str:
    """A path of this machine; a hub id as it is."""
    return str(Path(name).absolute()) if Path(name).exists() else name
