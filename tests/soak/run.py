"""A server under 64 clients at once, for as long as told; then its engine is killed, and it is started again.

    python -m tests.soak.run --seconds 600 [--runner V2] [--report benchmarks/results/soak.json]

Greedy answers must be those without speculation, counters must add up, memory and open files stay flat, and no request
may be stuck. Exit status 1 if anything is wrong; the report says what was done.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from tests.soak import watching
from tests.soak.clients import Answer, Tally, client, send
from tests.soak.traffic import MAX_MODEL_LEN, Ask, greedy_questions, traffic
from tests.support.models import heldout
from tests.support.serving import Server, environment, free_port, running

# Room for three of the longest requests where sixteen may run.
SMALL = {"max-model-len": MAX_MODEL_LEN, "max-num-seqs": 16, "block-size": 32, "num-gpu-blocks-override": 52}
SMALL |= {"max-num-batched-tokens": 256 + 16 * 4}
JSON_WITHOUT_BLANKS = '{"backend": "xgrammar", "disable_any_whitespace": true}'
NO_SPECULATION = ["--model", "models/tiny-llama", "--served-model-name", "tiny-llama", "--dtype", "float32"]
NO_SPECULATION += ["--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)]
SECONDS_TO_END = 60  # after the engine was killed
TELLING = 16  # requests in flight when it is


@contextmanager
def serving(runner: str, port: int, speculated: bool = True) -> Iterator[Server]:
    """The example's server, with a KV cache too small for its requests; or one without a head."""
    pair = ["--config", "examples/pairs/tiny.yaml"] if speculated else NO_SPECULATION
    start = ["tests/soak/serve_v2.py"] if runner == "V2" else ["-m", "vllm.entrypoints.openai.api_server"]
    command = [sys.executable, *start, *pair, "--host", "127.0.0.1", "--port", str(port)]
    command += [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    command += ["--structured-outputs-config", JSON_WITHOUT_BLANKS]
    env = environment() | ({"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"} if runner == "V2" else {})
    with running(command, port, env) as server:
        try:
            yield server
        except BaseException:
            log = server.log()
            print(f"the server wrote:\n{log[max(log.find('Traceback'), 0) :][:6000]}", file=sys.stderr)
            raise


async def answers(url: str, asks: list[Ask]) -> dict[int, Answer]:
    """Of each known question, asked eight at a time."""
    gate = asyncio.Semaphore(8)

    async def answer(session: aiohttp.ClientSession, ask: Ask) -> Answer:
        async with gate:
            ended, choices, _ = await send(session, ask)
        assert ended == "answered", f"{ended}: {ask}"
        return choices[0]

    async with aiohttp.ClientSession(url) as session:
        right = await asyncio.gather(*(answer(session, ask) for ask in asks))
    return {ask.known: answer for ask, answer in zip(asks, right, strict=True) if ask.known is not None}


async def soak(
    server: Server, known: list[Ask], right: dict[int, Answer], seconds: float, clients: int, filtered: bool
) -> tuple[Tally, list[dict[str, float]]]:
    """Clients at once, and a sample of the server's memory every so often."""
    tally, prompts = Tally(), heldout()
    curve, began = [], time.monotonic()
    until = asyncio.get_running_loop().time() + seconds
    jobs = [
        asyncio.create_task(client(server.url, traffic(seed, known, prompts, filtered), right, tally, until))
        for seed in range(clients)
    ]
    while not all(job.done() for job in jobs):
        curve.append(await asyncio.to_thread(watching.sample, server, began))
        await asyncio.wait(jobs, timeout=max(1, seconds / 120))
    await asyncio.gather(*jobs)
    await asyncio.to_thread(watching.wait_until_idle, server)  # it may not have noticed the last that went away
    return tally, curve


async def kill_the_engine(server: Server, known: list[Ask]) -> tuple[dict[str, Any], list[str]]:
    """Kill the engine's process under requests: clients get an error at once, the server says why and ends."""
    those, seconds_long = watching.processes(server), {"max_tokens": 400, "ignore_eos": True}
    asks = [replace(ask, body=ask.body | seconds_long) for ask in known if ask.kind in ("completion", "chat")]
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=SECONDS_TO_END)) as session:
        jobs = [asyncio.create_task(send(session, ask)) for ask in asks[:TELLING]]
        await asyncio.sleep(0.3)
        jobs = [job for job in jobs if not job.done()]  # drafts that are looked up make some answers short work
        watching.engine_core(server).kill()
        told = await asyncio.gather(*jobs, return_exceptions=True)
    left = await asyncio.to_thread(watching.wait_until_ended, server, those, SECONDS_TO_END)
    endings = {type(end).__name__ if isinstance(end, BaseException) else end[0] for end in told}
    wrong = [f"after the engine was killed a client got {end}" for end in endings & {"answered", "TimeoutError"}]
    if left["processes left"] or not left["log"]:
        wrong.append(f"after the engine was killed: {left}")
    return left | {"clients got": sorted(endings)}, wrong


def run(seconds: float, runner: str, clients: int = 64, questions: int = 120) -> dict[str, Any]:
    """The whole soak; the report, whose "wrong" is empty where all is well."""
    known, port = greedy_questions(questions), free_port()
    with serving(runner, port, speculated=False) as server:
        right = asyncio.run(answers(server.url, known))
    with serving(runner, port) as server:
        first = asyncio.run(answers(server.url, known[:8]))  # and warm
        before = watching.counters(server)
        tally, curve = asyncio.run(soak(server, known, right, seconds, clients, filtered=runner == "V1"))
        after = watching.counters(server)
        wrong = [*tally.wrong, *watching.add_up(after, before, tally), *watching.grown(curve)]
        killed, more = asyncio.run(kill_the_engine(server, known))
    began = time.monotonic()
    with serving(runner, port) as server:
        again = asyncio.run(answers(server.url, known[:8]))
        restarted = round(time.monotonic() - began, 1)
    if any(answer != right[number] for number, answer in [*first.items(), *again.items()]):
        wrong.append("answers before the soak, or after the restart, are not the unspeculated ones")
    return {
        "runner": runner,
        "seconds": seconds,
        "clients": clients,
        "requests": dict(sorted(tally.asked.items())),
        "ended": dict(sorted(tally.ended.items())),
        "answers compared": tally.compared,
        "differences": sum(line.startswith("question") for line in tally.wrong),
        "tokens": {"prompt": tally.prompt_tokens, "output": tally.output_tokens},
        "preemptions": after["vllm:num_preemptions_total"] - before["vllm:num_preemptions_total"],
        "faults": {
            "clients that left": tally.ended["left"],
            "wrong requests": tally.asked["wrong"],
            "engine killed": 1,
        },
        "engine killed": killed,
        "restarted in seconds": restarted,
        "memory in MB, second quarter and last": watching.growth(curve, "megabytes"),
        "open files, second quarter and last": watching.growth(curve, "files"),
        "wrong": [*wrong, *more],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="of traffic (default: 600)")
    parser.add_argument("--runner", choices=("V1", "V2"), default="V1")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--questions", type=int, default=120, help="greedy questions whose answers are compared")
    parser.add_argument("--report", type=Path, help="JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends, too
    report = run(args.seconds, args.runner, args.clients, args.questions)
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
