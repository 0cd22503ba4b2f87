"""One cell: one call of ``vllm bench serve``, watched, and what is kept of it.

``python -m peagle_vllm.bench.client ARGUMENTS`` is ``vllm bench serve ARGUMENTS``. vLLM's CPU build has no working
``vllm`` command (server.py says why); delete ``main`` and call the command once that is mended.
"""

import contextlib
import errno
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from peagle_vllm.bench import processes
from peagle_vllm.bench.cells import SAMPLES, Cell
from peagle_vllm.bench.processes import failure_reason
from peagle_vllm.bench.server import (
    HOST,
    MODEL_NAME,
    Gauges,
    Server,
    ServerFailed,
    client_environment,
    serve_arguments,
    serve_environment,
)
from peagle_vllm.bench.suite import HUB, Suite, is_path

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


def configuration(suite: Suite, folder: Path, cell: Cell, *, server: list[str], client: list[str]) -> dict[str, Any]:
    """Everything that was asked for, as commands, variables and data; ``folder`` is the suite's."""
    dataset = suite.datasets[cell.dataset]
    found: dict[str, Any] = {
        "suite": suite.name,
        "suite_fingerprint": suite.fingerprint(),
        "serve": ["python", *server[1:], *serve_arguments(suite, cell.arm, cell.k)],
        "bench": ["python", *client[1:], *bench_arguments(suite, cell)],
        "environment": serve_environment(suite, cell.arm),
        "dataset": dataset.model_dump(mode="json", exclude_none=True),
        "layers": layers(suite, folder, cell.arm),
    }
    if dataset.jsonl is not None:
        found["dataset"]["sha256"] = hashlib.sha256((folder / dataset.jsonl).read_bytes()).hexdigest()
    return found


def without_paths(text: str) -> str:
    """A result says nothing about where things lie on the machine that made it."""
    return text.replace(str(Path.cwd()), ".").replace(str(Path.home()), "~")


def without_texts(raw: dict[str, Any]) -> dict[str, Any]:
    """Samples rounded to the microsecond; texts as hashes, enough to see whether two arms wrote the same."""
    kept = {name: value for name, value in raw.items() if name not in ("generated_texts", "errors", "tokenizer_id")}
    for name in SAMPLES:
        if name in kept:
            kept[name] = [[round(v, 6) for v in x] if isinstance(x, list) else round(x, 6) for x in kept[name]]
    texts = raw.get("generated_texts", [])
    kept["texts_sha256"] = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
    return kept


def layers(suite: Suite, folder: Path, arm_name: str) -> dict[str, int]:
    """Layers of ``target`` and ``draft``; what no config.json on this machine tells is left out."""
    names = {"target": suite.target, "draft": (suite.arms[arm_name].speculative_config or {}).get("model")}
    found = {}
    for role, name in names.items():
        if isinstance(name, str) and (number := _layers(name, folder)):
            found[role] = number
    return found


def _layers(name: str, folder: Path) -> int | None:
    file = folder / name / "config.json" if is_path(name) else _from_hub_cache(name)
    if file is None or not file.is_file():
        return None
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        return None
    nested = [config.get(key) for key in ("transformer_layer_config", "text_config")]
    for place in (*nested, config):
        if isinstance(place, dict) and isinstance(place.get("num_hidden_layers"), int):
            return place["num_hidden_layers"]
    return None


def _from_hub_cache(name: str) -> Path | None:
    """The server has just loaded it, so it is there. Nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of a repository
        return None
    return Path(found) if isinstance(found, str) else None


def main() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    bench_serve(parser.parse_args())


if __name__ == "__main__":
    main()
