"""The steps between prompts and training: speculators' commands, called and looked after."""

import json
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from peagle_vllm.bench import processes
from peagle_vllm.bench.cells import write_whole
from peagle_vllm.bench.server import Server
from peagle_vllm.heads.convert import new_folder
from peagle_vllm.heads.files import one_line
from peagle_vllm.heads.target import read_target
from peagle_vllm.train import TrainError, TryAgain, serve
from peagle_vllm.train.config import STAMP, Config

REFUSED = "InvalidResponseError"  # speculators' name for an answer that a second try would not change
BYTES = {"bfloat16": 2, "float32": 4}


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a file with JSON in each line; a last line that was cut off is left out."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise TrainError(f"{file}: cannot be read ({error.strerror}); the step before makes it") from None
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_whole(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def speculators(words: list[str], log: Path, server: Server | None = None) -> None:
    """Run a command of speculators with its output in ``log``; it is ended where ``server`` ends.

    Raises:
        TrainError, TryAgain: it fails; one line with its reason.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    process = processes.start([sys.executable, "-m", "speculators", *words], cwd=Path.cwd(), env={}, log=log)
    try:
        while (status := process.poll()) is None:
            if server:
                server.check()
            time.sleep(0.1)
    finally:
        processes.end(process)
    if status:
        if server:
            server.check_well()
        reason = one_line(processes.failure_reason(log), 300)
        kind = TryAgain if "onnection" in reason else TrainError  # the user's own server is not there
        raise kind(f"speculators {words[0]} failed ({reason}); its log: {log}")


# ------------------------------------------------------------------------------------------------ answers


def answers(config: Config) -> str:
    """Let the target answer every prompt: ``answers.jsonl``, a row of token ids and loss mask for each answer.

    The first ``data.held_out`` prompts are answered greedily. What was answered before is kept, but for the last
    conversation, of which rows may be missing.

    Raises:
        TryAgain: some prompts have no answer yet.
    """
    prompts, file = config.run / "prompts.jsonl", config.run / "answers.jsonl"
    asked = read_lines(prompts)
    order = {row["id"]: number for number, row in enumerate(asked)}
    rows = read_lines(file) if file.exists() else []
    if len(order) <= config.data.held_out:
        raise TrainError(f"{prompts}: {len(order)} prompts, of which {config.data.held_out} are held out; add prompts")
    write_lines(file, [row for row in rows if row["primary_id"] != rows[-1]["primary_id"]])
    errors, bare = file.with_suffix(".errors.jsonl"), config.run / "logs/prompts.jsonl"
    errors.unlink(missing_ok=True)
    bare.parent.mkdir(exist_ok=True)
    write_lines(bare, [{"id": row["id"], "messages": row["messages"]} for row in asked])  # what speculators reads of it
    command = ["regenerate-responses", "--dataset", str(bare), "--outfile", str(file), "--resume"]
    command += ["--endpoint", f"{config.data.endpoint}/chat/completions", "--model", config.target]
    command += ["--max-tokens", str(config.data.max_tokens)]
    log = config.run / "logs/answers.log"
    with serve.running(config, serve.arguments(config), log.with_name("answers-server.log")) as server:
        if config.data.temperature:
            done = {row["primary_id"] for row in read_lines(file)}
            greedy = [key for key in order if order[key] < config.data.held_out and key not in done]
            if greedy:  # they come first in the file
                limit = ["--limit", str(len(greedy))]
                speculators([*command, *limit, "--sampling-params", '{"temperature": 0}'], log, server)
        sampling = json.dumps({"temperature": config.data.temperature, "seed": config.optimizer.seed})
        speculators([*command, "--sampling-params", sampling], log, server)
        rows = [_plain(row) for row in read_lines(file)]
        answered = {row["primary_id"] for row in rows}
        failures = {row["id"]: row["metadata"]["error"] for row in (read_lines(errors) if errors.exists() else [])}
        refused = {key: error for key, error in failures.items() if REFUSED in error and key not in answered}
        if missing := [key for key in order if key not in answered and key not in refused]:
            if server:
                server.check_well()
            reason = one_line(failures.get(missing[0], "no reason given"), 200)
            raise TryAgain(
                f"{len(missing)} of {len(order)} prompts have no answer ({reason}); the same command goes on"
            )
    if not rows:
        raise TrainError(f"the server refused all {len(order)} prompts ({one_line(next(iter(refused.values())), 300)})")
    write_lines(file, sorted(rows, key=lambda row: (order[row["primary_id"]], row["id"])))
    cut = sum(row["finish_reason"] == "length" for row in rows)
    more = f"; {len(refused)} prompts refused by the server, the reasons are in {errors.name}" if refused else ""
    return f"{len(rows)} answers to {len(answered)} prompts, {cut} of them ended by max_tokens{more}"


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """An answer without times and addresses, so that a second run writes the same file."""
    if "metadata" not in row:
        return row
    kept = {key: row[key] for key in ("id", "primary_id", "input_ids", "loss_mask", "text")}
    temperature = row["metadata"]["sampling_params"]["temperature"]
    return {**kept, "finish_reason": row["metadata"]["finish_reason"], "temperature": temperature}


# --------------------------------------------------------------------------------------------------- data


def data(config: Config) -> str:
    """Make speculators' Arrow data of the answers, ``data/``, the ``held_out`` documents last.

    Raises:
        TrainError: documents are longer than a step, and ``data.long`` does not say that they be split.
    """
    from datasets import concatenate_datasets, load_from_disk

    if config.data_folder.exists():
        return f"{config.data_folder} is there and kept; remove it to make it again, or `train pipeline --from data`"
    answered = read_lines(config.run / "answers.jsonl")
    rows = [row for row in answered if any(row["loss_mask"])]
    held = rows[: config.data.held_out]
    asked = {row["primary_id"] for row in held}  # later turns of these conversations are not learned from
    learn = [row for row in rows[len(held) :] if row["primary_id"] not in asked]
    if not learn or any(row["temperature"] for row in held):
        which = f"{len(rows)} answers, of which {config.data.held_out} greedy ones are to be held out, are too few"
        raise TrainError(f"{config.run / 'answers.jsonl'}: {which}; add prompts, or lower held_out in data")
    parts = {"learn": learn, "held": held}
    lengths = [len(row["input_ids"]) for row in (*learn, *held)]
    longer = [length for length in lengths if length > config.step.tokens]
    if longer and config.data.long == "refuse":
        which = f"{len(longer)} of {len(lengths)} documents have more than step.tokens ({config.step.tokens}) tokens"
        raise TrainError(f"{which}, the longest {max(longer)}: raise step.tokens, or write `long: split` in data")
    with new_folder(config.data_folder) as folder:
        for what, some in parts.items():
            made = folder / what
            file = made.with_suffix(".jsonl")
            write_lines(file, ({key: row[key] for key in ("input_ids", "loss_mask")} for row in some))
            words = ["prepare-data", "--model", config.target, "--data", str(file), "--output", str(made)]
            words += ["--seq-length", str(max(lengths))]
            if what == "learn":
                words += ["--no-skip-token-freq", "--token-freq-path", str(folder / "token_freq.pt")]
            speculators(words, config.run / "logs/data.log")
        both = [load_from_disk(str(folder / what)) for what in parts]
        if (num := sum(map(len, both))) != len(lengths):
            raise TrainError(f"speculators kept {num} of {len(lengths)} documents; see {config.run / 'logs/data.log'}")
        concatenate_datasets(both).with_format("torch").save_to_disk(folder)
        for what in parts:
            shutil.rmtree(folder / what)
            (folder / f"{what}.jsonl").unlink()
    aside = len(rows) - len(lengths), len(answered) - len(rows), len(longer)
    left_out = "{} of held-out conversations and {} empty ones are left out, {} are longer than a step and split"
    counts = f"{len(lengths)} documents, {sum(lengths)} tokens, the longest {max(lengths)}, {len(held)} held out"
    return f"{counts}; {left_out.format(*aside)}"


# ------------------------------------------------------------------------------------------------- states


def states(config: Config) -> str:
    """Write the hidden states of every document to ``data/hidden_states``; files that are there and fit are kept.

    Raises:
        TrainError: the disk is too small; the server's states are of another dtype.
        TryAgain: states of some documents are not there yet.
    """
    from datasets import load_from_disk

    folder, rows = config.data_folder / "hidden_states", load_from_disk(str(config.data_folder)).with_format(None)
    stamp = json.dumps(config.stamp, indent=2) + "\n"
    if config.data.online:
        write_whole(config.data_folder / STAMP, stamp)
        return "hidden states come from the server while training (data.online); nothing is stored"
    if config.data.backend not in ("file", "fp8"):
        raise TrainError(
            f"backend: {config.data.backend} stores no files; set `online: true` in data, or backend: file"
        )
    folder.mkdir(exist_ok=True)
    missing = _wrong(config, rows)
    tokens, layers, hidden = sum(rows["seq_len"]), len(config.aux_layers) + 1, read_target(config.target).hidden_size
    size = 1 if config.data.backend == "fp8" else BYTES[config.step.dtype]
    need, free = tokens * layers * hidden * size, shutil.disk_usage(folder).free
    product = f"{tokens:,} tokens x {layers} layers x {hidden:,} x {size} bytes"
    print(f"hidden states: {product} = {need / 1e9:,.3f} GB; {free / 1e9:,.1f} GB are free in {folder}", flush=True)
    if need * len(missing) / len(rows) > free:
        raise TrainError(f"{folder}: not enough room; use `backend: fp8` or `online: true` in data, or another disk")
    if missing:
        _extract(config, rows)
    write_whole(config.data_folder / STAMP, stamp)
    return f"hidden states of {len(rows)} documents; those of {len(rows) - len(missing)} were there"


def _extract(config: Config, rows: Any) -> None:
    """Let the server write the hidden states that are not there."""
    partial, log = config.run / "states.partial", config.run / "logs/states.log"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    with serve.running(config, serve.arguments(config, partial), log.with_name("states-server.log")) as server:
        words = ["generate-offline-data", "--model", config.target, "--endpoint", config.data.endpoint]
        speculators([*words, "--preprocessed-data", str(config.data_folder)], log, server)
        if wrong := _wrong(config, rows):
            if server:
                server.check_well()
            which = f"{len(wrong)} of {len(rows)} documents have no hidden states yet, row {wrong[0]} is the first"
            raise TryAgain(f"{which}; {log} says why, the same command goes on")
    shutil.rmtree(partial)


def _wrong(config: Config, rows: Any) -> list[int]:
    """The documents without a file of hidden states; one that is cut off, or another document's, is removed."""
    shape = [len(config.aux_layers) + 1, read_target(config.target).hidden_size]
    found = []
    for number, row in enumerate(rows.select_columns("input_ids")):
        file = config.data_folder / f"hidden_states/hs_{number}.safetensors"
        try:
            with safe_open(file, "pt") as opened:
                same = opened.get_tensor("token_ids").tolist() == row["input_ids"]
                fits = same and opened.get_slice("hidden_states").get_shape()[1:] == shape
        except (OSError, SafetensorError):
            fits = False
        if not fits:
            file.unlink(missing_ok=True)
            found.append(number)
    return found
