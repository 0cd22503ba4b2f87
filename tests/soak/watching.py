"""The server from outside: its processes' memory and files, its counters, and its death."""

import re
import time
from collections import defaultdict
from contextlib import suppress
from statistics import median
from typing import Any

import psutil

from tests.soak.clients import Tally
from tests.soak.traffic import K
from tests.support.serving import Server

ROOM = 1.08, 48.0  # by which factor, and how many MB more, memory may grow from the second quarter of a run to the last


def processes(server: Server) -> list[psutil.Process]:
    """The server's process and all below it."""
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def engine_core(server: Server) -> psutil.Process:
    """The process that vLLM calls its engine core."""
    return next(process for process in processes(server)[1:] if "EngineCore" in " ".join(process.cmdline()))


def sample(server: Server, began: float) -> dict[str, float]:
    """Seconds, megabytes of all processes, and open files."""
    every = processes(server)
    return {
        "second": round(time.monotonic() - began, 1),
        "megabytes": round(sum(process.memory_info().rss for process in every) / 1e6, 1),
        "files": sum(process.num_fds() for process in every),
    }


def growth(curve: list[dict[str, float]], name: str) -> tuple[float, float]:
    """The median of the second quarter of a curve, and that of the last."""
    values, quarter = [sample[name] for sample in curve], len(curve) // 4
    return median(values[quarter : 2 * quarter] or values), median(values[-quarter:] or values)


def grown(curve: list[dict[str, float]]) -> list[str]:
    """What did not stay flat, a line each."""
    (before, after), (files, files_after) = growth(curve, "megabytes"), growth(curve, "files")
    bounds = {
        f"memory grew from {before} MB to {after} MB": after <= before * ROOM[0] + ROOM[1],
        f"open files grew from {files} to {files_after}": files_after <= files + 64,  # as many as there are clients
    }
    return [line for line, ok in bounds.items() if not ok]


def counters(server: Server) -> dict[str, float]:
    """vLLM's counters, each summed over its labels; those of finished requests and of positions by label, too."""
    sums: dict[str, float] = defaultdict(float)
    for name, labels, value in re.findall(r"^(vllm:\w+)\{(.*)\} (\S+)$", server.get("/metrics"), re.MULTILINE):
        sums[name] += float(value)
        for key, word in re.findall(r'(finished_reason|position)="(\w+)"', labels):
            sums[f"{name} {key}={word}"] += float(value)
    return sums


def add_up(now: dict[str, float], before: dict[str, float], tally: Tally) -> list[str]:
    """Which counters of an idle server do not fit what the clients saw, a line each."""
    by = {name: value - before.get(name, 0) for name, value in now.items()}
    finished = sum(by.get(f"vllm:request_success_total finished_reason={word}", 0) for word in ("stop", "length"))
    per_position = [by.get(f"vllm:spec_decode_num_accepted_tokens_per_pos_total position={i}", 0) for i in range(K)]
    names = ("drafts", "draft_tokens", "accepted_tokens")
    drafts, drafted, accepted = (by[f"vllm:spec_decode_num_{name}_total"] for name in names)
    output, prompt = by["vllm:generation_tokens_total"], by["vllm:prompt_tokens_total"]
    expected = {
        "requests run": now["vllm:num_requests_running"] == 0,
        "requests wait": now["vllm:num_requests_waiting"] == 0,
        "KV blocks are in use": now["vllm:kv_cache_usage_perc"] == 0,
        f"{finished} choices finished": tally.choices <= finished,  # more: of clients that left
        f"{output} output tokens": tally.output_tokens <= output,
        f"{prompt} prompt tokens": tally.prompt_tokens <= prompt,
        f"{drafted} draft tokens in {drafts} drafts": 0 < drafts <= drafted <= K * drafts,
        f"{accepted} accepted tokens": 0 < accepted <= drafted and accepted == sum(per_position),
        f"accepted by position {per_position}": per_position == sorted(per_position, reverse=True),
        f"{accepted} accepted of {output} output tokens": accepted < output,
        "no preemption": by["vllm:num_preemptions_total"] > 0,
        "errors inside": by.get("vllm:request_success_total finished_reason=error", 0) == 0,
    }
    seen = str(vars(tally))[:600]
    return [f"counters do not add up: {what}; the clients saw {seen}" for what, ok in expected.items() if not ok]


def wait_until_idle(server: Server, seconds: float = 60) -> None:
    """Until no request runs, or the time is over: what still runs then is for ``add_up`` to tell."""
    deadline = time.monotonic() + seconds
    while server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_until_ended(server: Server, those: list[psutil.Process], seconds: float) -> dict[str, Any]:
    """What is left of a server whose engine was killed. vLLM then ends with status 0."""
    began = time.monotonic()
    while (left := list(filter(_runs, those))) and time.monotonic() - began < seconds:
        time.sleep(0.1)
    lines = [line for line in server.log().splitlines() if re.search(r"EngineDead|died|Engine core", line)]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "processes left": [process.pid for process in left],
        "log": lines[0][:300] if lines else "",
    }
