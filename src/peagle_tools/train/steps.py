"""The steps between prompts and training: speculators' commands, run and checked."""

import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from peagle_tools.shared import processes
from peagle_tools.shared.files import new_folder, write_whole
from peagle_tools.shared.server import Server
from peagle_tools.train import TrainError, TryAgain, serve, shards
from peagle_tools.train.config import STAMP, Config
from peagle_vllm.heads.files import one_line
from peagle_vllm.heads.target import read_target

# In speculators' errors, what a second try would not change: a refused prompt, an answer without a token.
FINAL = ("InvalidResponseError", "empty assistant generation")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SKIPPED = re.compile(r"due to error: (.*?)\s*(?:\w+\.py:\d+)?$", re.MULTILINE)  # speculators' log of a failed request
LOOP, LOOPS = 4, 5  # an answer that has a run of 4 tokens 5 times is no text to learn from
WIDE = {"COLUMNS": "500"}  # its logs would break an error's line


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file with JSON in each line; a last line that was cut off is left out."""
    try:
        with file.open("rb") as lines:
            yield from (json.loads(line) for line in lines if line.endswith(b"\n"))
    except OSError as error:
        raise TrainError(f"{file}: cannot be read ({error.strerror}); the step before makes it") from None


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write ``rows`` whole or not at all; they may come from ``file`` itself."""
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)


def speculators(words: list[str], log: Path, server: Server | None = None) -> None:
    """Run a command of speculators with its output in ``log``; it is ended where ``server`` ends.

    Raises:
        TrainError, TryAgain: it fails; one line with its reason.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    process = processes.start(
        [sys.executable, "-m", "peagle_tools.train.library", *words], cwd=Path.cwd(), env=WIDE, log=log
    )
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
    order = {row["id"]: number for number, row in enumerate(read_lines(prompts))}
    if len(order) <= config.data.held_out:
        raise TrainError(f"{prompts}: {len(order)} prompts, of which {config.data.held_out} are held out; add prompts")
    done = [row["primary_id"] for row in read_lines(file)] if file.exists() else []
    if others := set(done) - set(order):
        raise TrainError(
            f"{file}: {len(others)} of its prompts are not in {prompts}; remove it, or put these prompts back"
        )
    if file.exists():
        write_lines(file, (row for row in read_lines(file) if row["primary_id"] != done[-1]))
    errors, bare = file.with_suffix(".errors.jsonl"), config.run / "logs/prompts.jsonl"
    errors.unlink(missing_ok=True)
    bare.parent.mkdir(exist_ok=True)
    write_lines(bare, ({"id": row["id"], "messages": row["messages"]} for row in read_lines(prompts)))
    command = ["regenerate-responses", "--dataset", str(bare), "--outfile", str(file), "--resume"]
    command += ["--endpoint", f"{config.data.endpoint}/chat/completions", "--model", config.target]
    command += ["--max-tokens", str(config.data.max_tokens)]
    log = config.run / "logs/answers.log"
    with serve.running(config, log.with_name("answers-server.log")) as server:
        if config.data.temperature:
            greedy = set(list(order)[: config.data.held_out]) - (set(done) - set(done[-1:]))
            if greedy:  # they come first in the file
                limit = ["--limit", str(len(greedy))]
                speculators([*command, *limit, "--sampling-params", '{"temperature": 0}'], log, server)
        sampling = json.dumps({"temperature": config.data.temperature, "seed": config.optimizer.seed})
        speculators([*command, "--sampling-params", sampling], log, server)
        answered = {row["primary_id"] for row in (read_lines(file) if file.exists() else ())}
        failures = {row["id"]: row["metadata"]["error"] for row in (read_lines(errors) if errors.exists() else ())}
        final = {key for key, error in failures.items() if any(words in error for words in FINAL)}
        refused = {key: failures[key] for key in final - answered}
        if missing := [key for key in order if key not in answered and key not in refused]:
            if server:
                server.check_well()
            reason = one_line(failures.get(missing[0], "no reason given"), 200)
            which = f"{len(missing)} of {len(order)} prompts have no answer yet"
            raise TryAgain(f"{which} ({reason}); the same command goes on")
    if not answered:
        raise TrainError(f"none of {len(order)} prompts has an answer ({one_line(next(iter(refused.values())), 300)})")
    write_lines(file, _in_order(file, order))
    ends = Counter(row["finish_reason"] for row in read_lines(file))
    counts = f"{ends.total()} answers to {len(answered)} prompts, {ends['length']} of them ended by max_tokens"
    return (
        f"{counts}; {len(refused)} prompts refused or answered with nothing{f', see {errors.name}' if refused else ''}"
    )


def _in_order(file: Path, order: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The answers in the order of the prompts; one at a time, since there may be many."""
    places, at = [], 0
    with file.open("rb") as lines:
        for line in lines:
            row = json.loads(line)
            places.append((order[row["primary_id"]], row["id"], at))
            at += len(line)
        for _, _, at in sorted(places):
            lines.seek(at)
            yield _plain(json.loads(lines.readline()))


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
    from datasets import load_from_disk

    if config.data_folder.exists():
        return f"{config.data_folder} is there and kept; remove it to make it again, or `train pipeline --from data`"
    file, num_held = config.run / "answers.jsonl", config.data.held_out
    if any("temperature" not in row for row in read_lines(file)):
        raise TrainError(f"{file}: is not finished; `peagle-vllm train answers` goes on with it")
    # Of each answer: its conversation, tokens (0 where it is empty, -1 where it loops), temperature.
    facts = [(row["primary_id"], _useful(row), row["temperature"]) for row in read_lines(file)]
    answered = [number for number, (_, length, _) in enumerate(facts) if length > 0]
    held = set(answered[:num_held])
    asked = {facts[number][0] for number in held}  # later turns of these conversations are not learned from
    learn = {number for number in answered[num_held:] if facts[number][0] not in asked}
    if not learn or any(facts[number][2] for number in held):
        which = f"{len(answered)} answers, of which {num_held} greedy ones are to be held out, are too few"
        raise TrainError(f"{file}: {which}; add prompts, or lower held_out in data")
    kept = held | learn
    lengths = [facts[number][1] for number in kept]
    longer = config.longer_than_a_step(lengths)
    with new_folder(config.data_folder) as folder:
        tokens, shuffled = folder / "tokens.jsonl", folder / "shuffled"
        rows = (row for number, row in enumerate(read_lines(file)) if number in kept)
        write_lines(tokens, ({key: row[key] for key in ("input_ids", "loss_mask")} for row in rows))
        words = ["prepare-data", "--model", config.target, "--data", str(tokens), "--output", str(shuffled)]
        words += ["--seq-length", str(max(lengths)), "--token-freq-path", str(folder / "token_freq.pt")]
        speculators([*words, "--no-skip-token-freq"], config.run / "logs/data.log")
        made = load_from_disk(str(shuffled))
        aside = {tuple(row["input_ids"]) for number, row in enumerate(read_lines(file)) if number in held}
        last = [number for number, row in enumerate(made.with_format(None)) if tuple(row["input_ids"]) in aside]
        if (len(made), len(last)) != (len(kept), len(held)):
            kept_by = f"speculators kept {len(made)} of {len(kept)} documents"
            raise TrainError(f"{kept_by}, {len(last)} of {len(held)} held-out ones; see {config.run}/logs/data.log")
        made.select([*sorted(set(range(len(made))) - set(last)), *last]).save_to_disk(folder)
        shutil.rmtree(shuffled)
        tokens.unlink()
    useless = Counter(length for _, length, _ in facts)
    left_out = (
        f"{len(answered) - len(lengths)} of held-out conversations, {useless[0]} empty and {useless[-1]} looping ones"
    )
    counts = f"{len(lengths)} documents, {sum(lengths)} tokens, the longest {max(lengths)}, {num_held} held out"
    return f"{counts}; {left_out} are left out, {len(longer)} are longer than a step and split"


def _useful(row: dict[str, Any]) -> int:
    """The tokens of an answer with its prompt: 0 of an empty one, -1 of one that loops."""
    said = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    runs = Counter(zip(*(said[start:] for start in range(LOOP)), strict=False))
    return -1 if max(runs.values(), default=0) >= LOOPS else len(row["input_ids"]) if said else 0


# ------------------------------------------------------------------------------------------------- states


def states(config: Config) -> str:
    """Write the hidden states of every document to ``data/hidden_states``; files that are there and fit are kept.

    Raises:
        TrainError: the disk is too small; the server's states are of another dtype.
        TryAgain: states of some documents are not there yet.
    """
    from peagle_tools.train.documents import read_rows

    folder, rows = config.data_folder / "hidden_states", read_rows(config).with_format(None)
    stamp = config.data_folder / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) != config.stamp:
        raise TrainError(f"{stamp}: is not {json.dumps(config.stamp)}; `train pipeline --from states` makes them again")
    write_whole(stamp, json.dumps(config.stamp, indent=2) + "\n")
    if config.data.online:
        return "hidden states come from the server while training (data.online); nothing is stored"
    if config.data.backend not in ("file", "fp8", "shards"):
        raise TrainError(f"data.backend: {config.data.backend} stores no files; set `online: true` or `backend: file`")
    folder.mkdir(exist_ok=True)
    missing = _wrong(config, rows)
    tokens, layers, hidden = sum(rows["seq_len"]), len(config.aux_layers) + 1, read_target(config.target).hidden_size
    size = 1 if config.data.backend == "fp8" else BYTES[config.target_dtype]
    need, free = tokens * layers * hidden * size, shutil.disk_usage(folder).free
    product = f"{tokens:,} tokens x {layers} layers x {hidden:,} x {size} bytes"
    print(f"hidden states: {product} = {need / 1e9:,.3f} GB; {free / 1e9:,.1f} GB are free in {folder}", flush=True)
    if need * len(missing) / len(rows) > free:
        raise TrainError(f"{folder}: not enough room; use `backend: fp8` or `online: true` in data, or another disk")
    if missing:
        _extract(config, rows, missing)
    if config.data.backend == "shards":
        shards.pack(folder, (length * layers * hidden * size for length in rows["seq_len"]))
    return f"hidden states of {len(rows)} documents; those of {len(rows) - len(missing)} were there"


def _extract(config: Config, rows: Any, missing: list[int]) -> None:
    """Let the server write the hidden states of ``missing``; requests that fail are sent again while that helps."""
    log, folder = config.run / "logs/states.log", config.data_folder / "hidden_states"
    for row in shards.Shards(folder).whole():
        save_file({}, shards.own_file(folder, row))  # speculators makes what has no file; ``pack`` removes it again
    with serve.running(config, log.with_name("states-server.log"), hidden_states=True) as server:
        words = ["generate-offline-data", "--model", config.target, "--endpoint", config.data.endpoint]
        while missing:
            speculators([*words, "--preprocessed-data", str(config.data_folder)], log, server)
            before, missing = missing, _wrong(config, rows)
            if not missing:
                break
            if server:
                server.check_well()
            reasons = SKIPPED.findall(log.read_text(errors="replace")) or ["no reason given"]
            which = f"{len(missing)} of {len(rows)} documents have no hidden states yet, row {missing[0]} is the first"
            why = f"{one_line(reasons[-1], 200)}; its log: {log}"
            if len(missing) == len(before):
                raise TryAgain(f"{which} ({why}); the same command goes on")
            print(f"states: {which} ({why}); they are asked for again", flush=True)


def _wrong(config: Config, rows: Any) -> list[int]:
    """The documents without hidden states; a file that is cut off, or of other documents, is removed."""
    shape = [len(config.aux_layers) + 1, read_target(config.target).hidden_size]
    stored = shards.Shards(config.data_folder / "hidden_states")
    found: set[int] = set()
    for number, row in enumerate(rows.select_columns("input_ids")):
        shard = stored.shard_of.get(number)
        file, end = (shard, f".{number}") if shard else (shards.own_file(stored.hidden_states_path, number), "")
        try:
            with safe_open(file, "pt") as opened:
                same = opened.get_tensor(f"token_ids{end}").tolist() == row["input_ids"]
                fits = same and opened.get_slice(f"hidden_states{end}").get_shape()[1:] == shape
        except (OSError, SafetensorError):
            fits = False
        if not fits:
            file.unlink(missing_ok=True)
            found.update(stored.rows[shard] if shard else [number])
    return sorted(found)
