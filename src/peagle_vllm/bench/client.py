"""``vllm bench serve``, one call a cell: its arguments, and the way to call it.

``python -m peagle_vllm.bench.client ARGUMENTS`` is ``vllm bench serve ARGUMENTS``. vLLM's CPU build has no working
``vllm`` command (server.py says why); delete ``main`` and call the command once that is mended.
"""

import json
import sys

from peagle_vllm.bench.cells import Cell
from peagle_vllm.bench.server import HOST, MODEL_NAME
from peagle_vllm.bench.suite import HUB, Suite

CLIENT = [sys.executable, "-m", "peagle_vllm.bench.client"]
RESULT = "vllm.json"


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


def main() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    bench_serve(parser.parse_args())


if __name__ == "__main__":
    main()
