"""One cell: one call of ``vllm bench serve``, watched.

``python -m peagle_vllm.bench.client ARGUMENTS`` is ``vllm bench serve ARGUMENTS``. vLLM's CPU build has no working
``vllm`` command (server.py says why); delete ``main`` and call the command once that is mended.
"""

import contextlib
import errno
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from peagle_vllm.bench import processes
from peagle_vllm.bench.cells import Cell
from peagle_vllm.bench.gauges import Gauges
from peagle_vllm.bench.processes import failure_reason
from peagle_vllm.bench.server import HOST, MODEL_NAME, Server, ServerFailed, client_environment
from peagle_vllm.bench.suite import HUB, Suite

CLIENT = [sys.executable, "-m", "peagle_vllm.bench.client"]
RESULT = "vllm.json"
PAUSE = 0.2  # seconds between two looks at a running client


class CellFailed(Exception):
    """One cell failed; the message says why. The sweep goes on."""


def measure(
    suite: Suite, cell: Cell, server: Server, gauges: Gauges, *, client: list[str], cwd: Path, partial: Path, log: Path
) -> dict[str, Any]:
    """What ``vllm bench serve`` wrote about this cell.

    Args:
        client: the command, without its arguments.
        partial: a folder for what is not whole yet.

    Raises:
        CellFailed: unless every request was answered, by a server that is still there.
        OSError: the disk is full.
    """
    folder = partial / cell.id
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = [*client, *bench_arguments(suite, cell), "--port", str(server.port)]
    command += ["--result-dir", str(folder), "--result-filename", RESULT]
    try:
        server.empty_prefix_cache()
    except OSError as error:
        with _as_cell_failure():
            server.check()
        raise CellFailed(f"the server did not empty its prefix cache: {error}") from None
    process = processes.start(command, cwd=cwd, env=client_environment(suite), log=log)
    deadline = time.monotonic() + suite.cell_seconds
    try:
        while (status := _wait(process)) is None:
            with _as_cell_failure():
                server.check()
            gauges.sample()
            if time.monotonic() > deadline:
                raise CellFailed(f"not done after {suite.cell_seconds} s (cell_seconds)")
    finally:
        processes.end(process, patience=5)
    with _as_cell_failure():
        server.check()
    if status:
        words = failure_reason(log)
        if "No space left on device" in words:
            raise OSError(errno.ENOSPC, "")
        raise CellFailed(f"vllm bench serve: {processes.how_it_ended(status)}: {words}")
    try:
        raw = json.loads((folder / RESULT).read_text())
    except (OSError, ValueError):
        raise CellFailed(f"vllm bench serve wrote no result: {failure_reason(log)}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    asked = suite.datasets[cell.dataset].num_prompts(cell.concurrency)
    if raw.get("completed") != asked or raw.get("failed"):
        first = next((text for text in raw.get("errors", []) if text), "no error was given")
        why = first.strip().splitlines()[-1][:300]
        raise CellFailed(f"{raw.get('completed')} of {asked} requests were answered: {why}")
    return raw


def bench_arguments(suite: Suite, cell: Cell) -> list[str]:
    """Arguments of ``vllm bench serve`` for one cell; port and result folder are left out."""
    dataset = suite.datasets[cell.dataset]
    words = ["--backend", "openai", "--endpoint", "/v1/completions", "--host", HOST]
    words += ["--model", suite.target, "--served-model-name", MODEL_NAME]
    if dataset.hub is not None:
        words += ["--dataset-name", "hf", "--dataset-path", HUB[dataset.hub]]
    elif dataset.jsonl is not None:
        words += ["--dataset-name", "custom", "--dataset-path", dataset.jsonl, "--disable-shuffle"]
    elif dataset.speed_bench is not None:
        words += ["--dataset-name", "speed_bench", "--dataset-path", dataset.speed_bench, "--disable-shuffle"]
        words += ["--speed-bench-dataset-subset", dataset.speed_bench_subset]
        words += ["--speed-bench-output-len", str(dataset.output_tokens)]
        if dataset.speed_bench_category is not None:
            words += ["--speed-bench-category", dataset.speed_bench_category]
    else:
        words += ["--dataset-name", "random", "--input-len", str(dataset.random_input_tokens)]
    words += ["--num-prompts", str(dataset.num_prompts(cell.concurrency)), "--output-len", str(dataset.output_tokens)]
    body: dict[str, object] = {}
    if dataset.chat and dataset.random_input_tokens is None:
        body["add_special_tokens"] = False  # the chat template has put them in
    else:
        words += ["--skip-chat-template"]
    if dataset.ignore_eos:
        words += ["--ignore-eos"]
    if body:
        words += ["--extra-body", json.dumps(body)]
    words += ["--max-concurrency", str(cell.concurrency), "--num-warmups", str(suite.warmups)]
    words += ["--temperature", str(suite.temperature), "--seed", str(suite.seed)]
    words += ["--request-id-prefix", f"{cell.id}-", "--percentile-metrics", "ttft,tpot,itl,e2el"]
    return [*words, "--metric-percentiles", "50,90,99", "--save-result", "--save-detailed", "--disable-tqdm"]


def _wait(process: psutil.Popen) -> int | None:
    try:
        return process.wait(PAUSE)
    except psutil.TimeoutExpired:
        return None


@contextlib.contextmanager
def _as_cell_failure() -> Iterator[None]:
    try:
        yield
    except ServerFailed as error:
        raise CellFailed(str(error)) from None


def main() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    bench_serve(parser.parse_args())


if __name__ == "__main__":
    main()
