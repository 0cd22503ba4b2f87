"""One cell: one call of ``vllm bench serve``, watched, and what is kept of it.

``python -m peagle_tools.bench.client ARGUMENTS`` is ``vllm bench serve ARGUMENTS``, which also keeps what vLLM's client
drops of the answers: their token ids and the counts of their steps.
"""

import json
import shlex
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peagle_tools.bench.cells import Cell
from peagle_tools.bench.suite import HUB, Suite
from peagle_tools.shared import processes, server
from peagle_tools.shared.acceptance import BY_REQUEST, Answer
from peagle_tools.shared.prompt_files import read_prompts
from peagle_tools.shared.prompts import read_tokenizer, templated
from peagle_tools.shared.server import Server

COMMAND = [sys.executable, "-m", "peagle_tools.bench.client"]
MODEL_NAME = "target"  # what clients call the model, so that no path gets into a result
# Dev mode adds the endpoint that empties the prefix cache between cells. On loopback only.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


class CellFailed(Exception):
    """One cell failed; the message gives the reason. The sweep continues."""


def measure(suite: Suite, cell: Cell, serving: Server, *, cwd: Path, log: Path) -> dict[str, Any]:
    """What ``vllm bench serve`` wrote about this cell.

    CellFailed unless every request was answered; ServerFailed unless by a server that is still there.
    """
    try:
        serving.empty_prefix_cache()
    except OSError as error:
        serving.check()
        raise CellFailed(f"the server did not empty its prefix cache: {error}") from None
    with TemporaryDirectory() as folder:
        result = Path(folder, "vllm.json")
        command = [*COMMAND, *bench_arguments(suite, cell), "--port", str(serving.port)]
        command += ["--result-dir", folder, "--result-filename", result.name]
        process = processes.start(command, cwd=cwd, env=environment(suite), log=log)
        deadline = time.monotonic() + suite.cell_seconds
        try:
            while (status := process.poll()) is None:
                time.sleep(0.1)
                serving.check()
                if time.monotonic() > deadline:
                    raise CellFailed(f"not done after {suite.cell_seconds} s (cell_seconds)")
        finally:
            processes.end(process, patience=5)
        serving.check()
        if status:
            raise CellFailed(f"vllm bench serve: {processes.how_it_ended(status)}: {processes.failure_reason(log)}")
        raw: dict[str, Any] = json.loads(result.read_text())
    sent = suite.datasets[cell.dataset].num_prompts(cell.concurrency)
    if raw.get("completed") != sent or raw.get("failed"):
        first = next((text for text in raw.get("errors", []) if text), "no error was given")
        reason = first.strip().splitlines()[-1][:300]
        raise CellFailed(f"{raw.get('completed')} of {sent} requests were answered: {reason}")
    return raw


def serve_arguments(suite: Suite, arm_name: str, k: int) -> list[str]:
    """Arguments of the server for one arm at one depth; host and port are left out."""
    arm = suite.arms[arm_name]
    arguments = ["--model", suite.target, "--served-model-name", MODEL_NAME]
    arguments += [*shlex.split(suite.serve.flags), *shlex.split(arm.flags)]
    if arm.speculative_config is not None:
        config = {**arm.speculative_config, "num_speculative_tokens": k}
        arguments += ["--speculative-config", json.dumps(config), *BY_REQUEST]
    return arguments


def environment(suite: Suite, arm_name: str | None = None) -> dict[str, str]:
    """Variables of an arm's server; without an arm those of the client, which treats all arms alike."""
    return ENVIRONMENT | suite.serve.environment | (suite.arms[arm_name].environment if arm_name else {})


def bench_arguments(suite: Suite, cell: Cell) -> list[str]:
    """Arguments of ``vllm bench serve`` for one cell; port and result folder are left out."""
    dataset = suite.datasets[cell.dataset]
    words = ["--backend", "openai", "--endpoint", "/v1/completions", "--host", server.HOST]
    words += ["--model", suite.target, "--served-model-name", MODEL_NAME]
    if dataset.hub is not None:
        words += ["--dataset-name", "hf", "--dataset-path", HUB[dataset.hub]]
    elif dataset.jsonl is not None:
        words += ["--prompts", dataset.jsonl, "--disable-shuffle"]
    else:
        words += shlex.split(dataset.flags or "")
    words += ["--num-prompts", str(dataset.num_prompts(cell.concurrency)), "--output-len", str(dataset.output_tokens)]
    words += ["--max-concurrency", str(cell.concurrency), "--num-warmups", str(suite.warmups)]
    words += ["--temperature", str(suite.temperature), "--request-id-prefix", f"{cell.id}-"]
    words += ["--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99"]
    if "--trust-remote-code" in shlex.split(f"{suite.serve.flags} {suite.arms[cell.arm].flags}"):
        words.append("--trust-remote-code")
    return [*words, "--save-result", "--save-detailed", "--disable-tqdm"]


def keep_messages(client: Any, prefix: str) -> list[str]:
    """The messages that answer requests of this cell; filled while vLLM's client runs.

    Args:
        client: vLLM's module of clients, which drops an answer's token ids and metrics.
        prefix: of the cell's request ids; warm-up requests have none.
    """
    kept: list[str] = []

    class Handler(client.StreamedResponseHandler):
        def add_chunk(self, chunk_bytes: bytes) -> list[str]:
            messages = super().add_chunk(chunk_bytes)
            kept.extend(message for message in messages if f'"cmpl-{prefix}' in message)
            return messages

    client.StreamedResponseHandler = Handler
    return kept


def answers_of(messages: list[str]) -> list[Answer]:
    """The answers that verified drafts."""
    parts = defaultdict(list)
    for message in messages:
        part = json.loads(message.removeprefix("data: "))
        parts[part["id"]].append(part)
    answers = []
    for answer in parts.values():
        choices = [choice for part in answer for choice in part["choices"]]
        prompt = next(choice["prompt_token_ids"] for choice in choices if choice.get("prompt_token_ids"))
        output = [token for choice in choices for token in choice["token_ids"] or ()]
        metrics = [part["metrics"]["speculative_decoding"] for part in answer if part.get("metrics")]
        answers += [Answer(prompt, output, counts) for counts in metrics]
    return answers


def write_prompts(args: Any, file: Path) -> None:
    """Write the prompts of ``args.prompts`` as vLLM's data set ``custom`` reads them, in the target's chat template."""
    tokenizer = read_tokenizer(args.model, trust_remote_code=args.trust_remote_code)
    prompts = read_prompts(Path(args.prompts))[: args.num_prompts]  # those that vLLM takes
    texts = [templated(tokenizer, messages, tokenize=False) for messages in prompts]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    args.dataset_name, args.dataset_path = "custom", str(file)
    args.skip_chat_template = True


def main() -> None:
    from vllm.benchmarks import serve
    from vllm.benchmarks.lib import endpoint_request_func
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    parser.add_argument("--prompts", metavar="FILE", help="prompts in any form that peagle-vllm reads")
    args = parser.parse_args()
    # The chat template has put special tokens in; a suite's own data set may say otherwise.
    args.extra_body = {"add_special_tokens": False, **(args.extra_body or {}), "return_token_ids": True}
    messages = keep_messages(endpoint_request_func, args.request_id_prefix)
    with TemporaryDirectory() as folder:
        if args.prompts:
            write_prompts(args, Path(folder, "prompts.jsonl"))
        serve.main(args)
    result = Path(args.result_dir, args.result_filename)
    result.write_text(json.dumps(json.loads(result.read_text()) | {"answers": answers_of(messages)}))


if __name__ == "__main__":
    main()
