"""``peagle-vllm tune``: a short sweep on the user's own prompts, and the config that follows from it."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle_tools.bench.cli import DEFAULT, sweeping
from peagle_tools.shared.atomic_files import write_whole
from peagle_tools.shared.conversations import Messages
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.terminal import HeadArgument, check_extra, exit_if_unfit, fail

if TYPE_CHECKING:
    from peagle_tools.bench.suite import Suite

MOST_PROMPTS = 80
DATASET = "prompts"
HEADER = "# `bench run` measures a copy of this that you edit; docs/bench.md explains the keys.\n"
FULL_BATCH = 64  # requests in flight at which adaptive verification is measured, too


def tune(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The served model: a folder or a hub id.")],
    head: HeadArgument,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts: text or JSON lines, docs/bench.md. Without it MT-Bench."),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option("--k", min=1, help="A depth; may be given often. Without it 3, 5, 7, as trained."),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="As you serve; may be given often. Without it 1, 8.")
    ] = None,
    adaptive_verification: Annotated[
        bool, typer.Option("--adaptive-verification", help="Measure vLLM's adaptive verification too, up to c=64.")
    ] = False,
    serve: Annotated[
        str, typer.Option(metavar="FLAGS", help="Flags of `vllm serve`, word for word, in quotes.")
    ] = "--no-enable-prefix-caching",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="The longest answer, in tokens.")
    ] = 256,
    results: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where results go; without it bench-results/tune-HEAD.")
    ] = None,
) -> None:
    """Which K to serve on your prompts, and what it gains: a short sweep, then the whole speculative config.

    The suite that is measured is FOLDER/suite.yaml: copy it, add arms or data sets, and `bench run` the copy.

    Exit status: 0 measured; 1 the head does not fit; 2 unusable input, or a cell failed; 130 interrupted.
    """
    check_extra("vllm", *(["datasets"] if prompts is None else []))
    import torch

    from peagle_tools.bench.cells import grid, read_results
    from peagle_tools.bench.metrics import points
    from peagle_tools.bench.report import warnings
    from peagle_tools.bench.schedule import advice
    from peagle_tools.bench.suite import slug
    from peagle_tools.bench.sweep import Sweep
    from peagle_tools.shared.prompt_files import read_prompts
    from peagle_vllm.heads.checks import check
    from peagle_vllm.heads.files import find
    from peagle_vllm.heads.head import read_head
    from peagle_vllm.heads.target import read_target

    if adaptive_verification and not torch.cuda.is_available():
        fail("adaptive verification needs full CUDA graphs, and there is no GPU: leave --adaptive-verification out")
    name = slug(Path(head).resolve().name) or "suite"
    folder = results or DEFAULT / f"tune-{name}"
    with sweeping():
        chats = read_prompts(prompts, target) if prompts else []
        checked = read_head(find(head))
        exit_if_unfit(check(checked, read_target(target)))
        deepest = checked.trained_depth or 7
        depths = k or [depth for depth in (3, 5, 7) if depth <= deepest] or [deepest]
        config = {"method": "eagle3", "model": _as_in_suite(head, folder), "parallel_drafting": True}
        arms: dict[str, Any] = {"none": {}, "P-EAGLE": {"speculative_config": config, "k": depths}}
        if adaptive_verification:
            adaptive = config | {"enable_adaptive_verification": True}
            arms["P-EAGLE, adaptive verification"] = {"speculative_config": adaptive, "k": [max(depths)]}
        dataset: dict[str, Any] = {"jsonl": "./suite.jsonl"} if chats else {"hub": "mt-bench"}
        dataset |= {"prompts": min(len(chats) or MOST_PROMPTS, MOST_PROMPTS), "prompts_per_client": 4}
        written = {
            "name": name,
            "target": _as_in_suite(target, folder),
            "serve": {"flags": serve},
            "arms": arms,
            "datasets": {DATASET: dataset | {"output_tokens": max_tokens}},
            "concurrency": concurrency or [1, 8, *[FULL_BATCH] * adaptive_verification],
            "repeats": 3,  # one repeat shows no noise
        }
        suite = _write_suite(folder, written, chats)
        cells = grid(suite)
        which = f"prompts of {prompts}" if prompts else "no --prompts, so MT-Bench from the hub"
        print(f"tune: {which}, at least {dataset['prompts']} requests a cell")
        starts = len({cell.server_id for cell in cells})
        print(f"{len(cells)} cells over {starts} server starts; suite and results are in {folder}")
        if failed := Sweep(suite, folder, folder, cells).run():
            fail(f"{failed} cells failed; the lines above give the reasons")
        measured = points(read_results(folder))
    print()
    for line in warnings(DATASET, measured):
        print(f"Warning: {line}")
    print(*advice(DATASET, measured, suite.model_dump(mode="json"), head), sep="\n")


def _write_suite(folder: Path, suite: dict[str, Any], chats: list[Messages]) -> "Suite":
    """Write suite.yaml, and ``chats`` to suite.jsonl, into ``folder``; what is there must be the same.

    Raises:
        ToolError: other files are there, or the suite is not valid, and then nothing is left of it.
    """
    import yaml

    from peagle_tools.bench.suite import Suite
    from peagle_tools.shared.checked_yaml import read_yaml

    files = {folder / "suite.yaml": HEADER + yaml.safe_dump(suite, sort_keys=False)}
    if chats:
        files[folder / "suite.jsonl"] = "".join(json.dumps({"messages": messages}) + "\n" for messages in chats)
    if any(path.exists() and path.read_text() != text for path, text in files.items()):
        fix = "name another folder with --results"
        raise ToolError(f"{folder} holds a suite or results of other prompts or options; {fix}")
    folder.mkdir(parents=True, exist_ok=True)
    new = [path for path in files if not path.exists()]
    for path in new:
        write_whole(path, files[path])
    try:
        return read_yaml(folder / "suite.yaml", Suite, "suite")
    except ToolError:
        for path in new:
            path.unlink()
        raise


def _as_in_suite(model: str, folder: Path) -> str:
    """A folder as a suite in ``folder`` names it; a hub id as it is."""
    if not Path(model).is_dir():
        return model
    path = os.path.relpath(model, os.path.realpath(folder))
    return path if path.startswith("../") else f"./{path}"
