"""The steps between prompts and training: speculators' commands, run and checked."""

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from peagle_tools.shared import processes
from peagle_tools.shared.atomic_files import new_folder, write_whole
from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.shared.server import Server
from peagle_tools.train import serve
from peagle_tools.train.lines import read_lines, write_lines
from peagle_tools.train.peagle_yaml import LOOP, STAMP, Config
from peagle_vllm.heads.files import one_line
from peagle_vllm.heads.target import read_target

# In speculators' errors, what a second try would not change: a refused prompt, an answer without a token.
FINAL = ("HTTP 400 ", "HTTP 413 ", "HTTP 422 ", "empty assistant generation")
MOST_STATES = 64  # documents in flight to the server that writes hidden states, which keeps them until they are written
WIDE = {"COLUMNS": "500"}  # its logs would break an error's line


def speculators(words: list[str], log: Path, server: Server | None = None) -> None:
    """Run a command of speculators with its output in ``log``; it is ended where ``server`` ends.

    ToolError or TryAgain where it fails, a line with its reason.
    """
    command = [sys.executable, "-m", "peagle_tools.train.library", *words]
    process = processes.start(command, cwd=Path.cwd(), env=WIDE, log=log)
    try:
        while (status := process.poll()) is None:
            if server:
                server.check()
            time.sleep(0.1)
    finally:
        processes.end(process)
    if status:
        reason = one_line(processes.failure_reason(log), 300)
        kind = TryAgain if "onnection" in reason else ToolError  # the user's own server is not there
        raise kind(f"speculators {words[0]} failed ({reason}); its log: {log}")


def answers(config: Config) -> str:
    """Let the target answer every prompt: ``answers.jsonl``, a row of token ids and loss mask for each answer.

    What was answered before is kept, but for the last conversation, of which rows may be missing. TryAgain where some
    prompts have no answer yet.
    """
    prompts, file = config.run / "prompts.jsonl", config.run / "answers.jsonl"
    order = {row["id"]: number for number, row in enumerate(read_lines(prompts, needs=["id"]))}
    if len(order) <= config.data.held_out:
        raise ToolError(f"{prompts}: {len(order)} prompts, of which {config.data.held_out} are held out; add prompts")
    done = [row["primary_id"] for row in read_lines(file, must_exist=False, needs=["primary_id", "id"])]
    if unknown := set(done) - set(order):
        which = f"{len(unknown)} of its prompts are not in {prompts}"
        raise ToolError(f"{file}: {which}; remove it, or put these prompts back")
    if file.exists():  # without a line that was cut off
        write_lines(file, (row for row in read_lines(file) if row["primary_id"] != done[-1]))
    refused = _ask(config, list(order))

    def place(line: bytes) -> tuple[int, str]:
        row = json.loads(line)
        return order[row["primary_id"]], row["id"]

    # As lines, which take less memory than rows.
    lines = sorted(file.read_bytes().splitlines(), key=place)
    write_lines(file, (_plain(json.loads(line)) for line in lines))
    ends = Counter(row.get("finish_reason") for row in read_lines(file))
    cut = f"{ends['length']} of them ended by max_tokens, {ends['repetition']} where they loop"
    counts = f"{ends.total()} answers to {len(order) - refused} prompts, {cut}"
    return f"{counts}; {refused} prompts refused or answered with nothing, see answers.errors.jsonl"


def _ask(config: Config, prompts: list[str]) -> int:
    """Let speculators add answers to ``prompts``, which are ids, to answers.jsonl; how many have none for good."""
    file, log = config.run / "answers.jsonl", config.run / "logs/answers.log"
    errors = file.with_suffix(".errors.jsonl")
    errors.unlink(missing_ok=True)
    command = ["regenerate-responses", "--dataset", str(config.run / "prompts.jsonl"), "--outfile", str(file)]
    command += ["--model", config.target, "--resume", "--max-tokens", str(config.data.max_tokens)]
    command += ["--concurrency", str(config.data.concurrency)]
    # A target's generation_config.json may have penalties, with which no answer is greedy.
    greedy = {"temperature": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    command += ["--sampling-params", json.dumps({**greedy, "repetition_detection": LOOP})]
    with serve.running(config, log.with_name("answers-server.log")) as (endpoint, server):
        speculators([*command, "--endpoint", f"{endpoint}/chat/completions"], log, server)
        answered = {row["primary_id"] for row in read_lines(file, must_exist=False)}
        failures = {row["id"]: row["metadata"]["error"] for row in read_lines(errors, must_exist=False)}
        without = [key for key in prompts if key not in answered]
        missing = [key for key in without if not any(words in failures.get(key, "") for words in FINAL)]
        if missing:
            reason = one_line(failures.get(missing[0], "no reason given"), 200)
            which = f"{len(missing)} of {len(prompts)} prompts have no answer yet"
            if "InvalidResponseError" in reason:  # the server does not know the caller, or the model
                raise ToolError(f"{which} ({reason}); correct data.endpoint, and the same command continues")
            raise TryAgain(f"{which} ({reason}); the same command continues")
    if not answered:
        raise ToolError(f"none of {len(prompts)} prompts has an answer ({one_line(failures[without[0]], 300)})")
    return len(without)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """An answer without times and addresses, so that a second run writes the same file."""
    if "metadata" not in row:
        return row
    kept = {key: row[key] for key in ("id", "primary_id", "input_ids", "loss_mask", "text")}
    return {**kept, "finish_reason": row["metadata"]["finish_reason"]}


def data(config: Config) -> str:
    """Make speculators' Arrow data of the answers, ``data/``, the ``held_out`` documents last.

    ToolError where answers are missing or too few.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError
    from speculators.train.vocab_mapping import save_token_frequency_distribution

    if config.data_folder.exists():
        if not (config.data_folder / "dataset_info.json").exists():
            raise ToolError(f"{config.data_folder} is there and no data of speculators; name another folder")
        return f"{config.data_folder} is there and kept; remove it to make it again, or `train pipeline --from data`"
    file, num_held = config.run / "answers.jsonl", config.data.held_out
    needs = "primary_id", "input_ids", "loss_mask"
    are_finished = ["metadata" not in row for row in read_lines(file, needs=needs)]
    if not all(are_finished):
        raise ToolError(f"{file}: is not finished; `peagle-vllm train answers` continues it")

    def rows() -> Iterator[dict[str, Any]]:
        """Without answers that the context cut off: vLLM takes no prompt of that length, which ``states`` needs."""
        for row in read_lines(file):
            was_cut = row.get("finish_reason") == "length" and sum(row["loss_mask"]) < config.data.max_tokens
            if not was_cut and len(row["input_ids"]) != config.engine.get("max_model_len"):
                yield row

    def prompt(row: dict[str, Any]) -> list[int]:
        return row["input_ids"][: len(row["loss_mask"]) - sum(row["loss_mask"])]

    held = [*islice(rows(), num_held)]
    held_out, asked = {row["primary_id"] for row in held}, [prompt(row) for row in held]  # learned from nowhere

    def documents() -> Iterator[dict[str, Any]]:
        others = (row for row in rows() if row["primary_id"] not in held_out)
        learned = (row for row in others if prompt(row) not in asked)  # conversations may begin alike
        for row in chain(learned, islice(rows(), num_held)):
            ids = row["input_ids"]
            yield {"input_ids": ids, "loss_mask": row["loss_mask"], "seq_len": len(ids)}

    lengths, num_answers = [row["seq_len"] for row in documents()], len(are_finished)
    if len(lengths) <= num_held:
        few = f"{num_answers} answers are too few: {num_held} are held out"
        raise ToolError(f"{file}: {few}; add prompts, or lower held_out in data")
    with new_folder(config.data_folder) as folder:
        try:
            dataset = Dataset.from_generator(documents, cache_dir=str(folder / "cache")).with_format("torch")
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None
        dataset.save_to_disk(folder)
        save_token_frequency_distribution(dataset, folder / "token_freq.pt")
        shutil.rmtree(folder / "cache")
    counts = f"{len(lengths)} documents, {sum(lengths)} tokens, the longest {max(lengths)}, {num_held} held out"
    others = num_answers - len(lengths)
    return f"{counts}; {others} more of held-out conversations or prompts, or as long as the context, are left out"


def states(config: Config) -> str:
    """Write the hidden states of every document to ``data/hidden_states``; files that are there and fit are kept.

    ToolError where the disk is too small, or stored states are of another target, other layers or another dtype;
    TryAgain where those of some documents are not there yet.
    """
    from peagle_tools.train.documents import check_stamp, missing_states, read_rows

    if config.data.states == "memory":
        return "`run` computes them"
    folder, rows = config.data_folder / "hidden_states", read_rows(config).with_format(None)
    stamp = config.data_folder / STAMP
    if stamp.exists():
        check_stamp(config)
    write_whole(stamp, json.dumps(config.stamp, indent=2) + "\n")
    folder.mkdir(exist_ok=True)
    missing = missing_states(config, rows)
    if not missing:
        return f"hidden states of {len(rows)} documents were there"
    tokens, free = sum(rows.select(missing)["seq_len"]), shutil.disk_usage(folder).free
    layers, hidden = len(config.aux_layers) + 1, read_target(config.target).hidden_size
    need = tokens * layers * hidden * (4 if config.target_dtype == "float32" else 2)
    print(f"hidden states: {need / 1e9:,.3f} GB; {free / 1e9:,.1f} GB are free in {folder}", flush=True)
    if need > free:
        raise ToolError(f"{folder}: not enough room; put `folder` on another disk, or train on fewer prompts")
    log = config.run / "logs/states.log"
    words = ["generate-offline-data", "--model", config.target, "--preprocessed-data", str(config.data_folder)]
    words += ["--concurrency", str(min(config.data.concurrency, MOST_STATES))]
    words += ["--request-timeout", "3600"]  # a loaded machine is slow
    with serve.running(config, log.with_name("states-server.log"), hidden_states=True) as (endpoint, server):
        for number in missing:
            (folder / f"hs_{number}.safetensors").unlink(missing_ok=True)
        speculators([*words, "--endpoint", endpoint], log, server)
        if left := missing_states(config, rows):
            which = f"{len(left)} of {len(rows)} documents have no hidden states yet, row {left[0]} is the first"
            raise TryAgain(f"{which}; its log: {log}; the same command continues")
    return f"hidden states of {len(rows)} documents; those of {len(rows) - len(missing)} were there"
