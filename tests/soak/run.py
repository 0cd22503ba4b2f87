"""A server under 64 clients at once, for as long as told; then its engine is killed, and it is started again.

    python -m tests.soak.run --seconds 600 [--runner V2] > benchmarks/results/soak.json

Greedy answers must be those without speculation, and each request must end as it should. Exit status 1 if anything is
wrong; the report says what was done.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil
from openai import APIError, APIStatusError, AsyncOpenAI

from tests.support.models import heldout
from tests.support.serving import Server, environment, free_port, running

MODEL, MAX_MODEL_LEN, VOCAB = "tiny-llama", 512, 512
JSON_OBJECT = "JSON object"
KINDS = "completion", "chat", "stop", "long", JSON_OBJECT
WRONG: list[dict[str, Any]] = [  # what no server may answer
    *({"prompt": prompt} for prompt in ([-5], [VOCAB + 5] * 9, [9] * (MAX_MODEL_LEN + 1), "word " * 400_000)),
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "model": "another"},
    {"messages": []},
]
# Room for three of the longest requests where sixteen may run.
SMALL = {"max-model-len": MAX_MODEL_LEN, "max-num-seqs": 16, "block-size": 32, "num-gpu-blocks-override": 52}
SMALL |= {"max-num-batched-tokens": 256 + 16 * 4}
JSON_WITHOUT_BLANKS = '{"backend": "xgrammar", "disable_any_whitespace": true}'
NO_SPECULATION = ["--model", "models/tiny-llama", "--served-model-name", "tiny-llama", "--dtype", "float32"]
NO_SPECULATION += ["--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)]
PATIENCE = 180  # seconds without a byte from the server; a request that waits longer is stuck
SECONDS_TO_END = 60  # after the engine was killed
Answer = tuple[str, str | None]  # text, and why it finished


class Ask(NamedTuple):
    kind: str  # for the report
    body: dict[str, Any]  # parameters of the OpenAI client
    known: int | None = None  # number of the greedy question, whose answer is compared
    stream: bool = False  # whether the answer comes in pieces
    leaves: float | None = None  # seconds after which the client goes away


def greedy_questions(count: int) -> list[Ask]:
    """Questions of which each has one right answer."""
    prompts, rng = heldout(), random.Random(0)
    questions = []
    for number in range(count):
        kind, text = rng.choice(KINDS), " ".join(rng.choices(prompts, k=rng.randint(1, 3)))
        body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": rng.choice((4, 16, 48, 96))}
        if kind in ("chat", JSON_OBJECT):
            body["messages"] = [{"role": "user", "content": text[:300]}]
        elif kind == "long":
            tokens = rng.randint(150, MAX_MODEL_LEN - 1)
            body["prompt"] = [rng.randrange(8, VOCAB) for _ in range(tokens)]
            body |= {"max_tokens": min(MAX_MODEL_LEN - tokens, 40), "extra_body": {"ignore_eos": True}}
        else:
            body["prompt"] = text[: rng.choice((3, 400))]
        if kind == JSON_OBJECT:
            body["response_format"] = {"type": "json_object"}
        if kind == "stop":
            body["stop"] = [rng.choice(("e", "self", "\n", " the", "()"))]
        questions.append(Ask(kind, body, number))
    return questions


def traffic(seed: int, known: list[Ask], filtered: bool) -> Iterator[Ask]:
    """An endless mixture for one client, decided by its seed: of 64, 30 ask for JSON objects alone (vLLM 27969).

    Args:
        filtered: some requests ask for top_p or top_k; Triton's interpreter cannot run vLLM's kernel for them.
    """
    rng, prompts = random.Random(seed), heldout()
    objects = [ask for ask in known if ask.kind == JSON_OBJECT]
    # No seeds: on V1 without a GPU a seeded prompt in chunks ends the engine, "CPU Generator does not use offset".
    more: list[dict[str, Any]] = [{}, {"n": 3}, {"logprobs": 2}, {"presence_penalty": 1.0}]
    more += [{"top_p": 0.8}, {"extra_body": {"top_k": 5}}] if filtered else []
    while True:
        share = rng.random()
        if seed * 30 % 64 < 30:
            yield rng.choice(objects)
        elif share < 0.12:
            yield Ask("wrong", {"model": MODEL, "max_tokens": 8} | rng.choice(WRONG))
        else:
            heat = {"temperature": rng.choice((0.2, 0.7, 1.0, 1.5)), "max_tokens": rng.randint(1, 64)}
            body = {"model": MODEL, "prompt": rng.choice(prompts), **heat, **rng.choice(more)}
            ask = rng.choice(known) if share < 0.75 else Ask("sampled", body)
            leaves = rng.uniform(0, 2) if rng.random() < 0.15 else None
            yield ask._replace(stream=rng.random() < 0.5, leaves=leaves)


@dataclass
class Tally:
    """What clients sent, and what became of it."""

    requests: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    wrong: list[str] = field(default_factory=list)

    def note(self, ask: Ask, ended: str, answer: Answer | None, right: Mapping[int, Answer]) -> None:
        """Add one request: ``ended`` is answered, left, refused or an error; what should not be goes to ``wrong``."""
        self.requests[ask.kind] += 1
        self.ended[ended] += 1
        if (ended == "refused") != (ask.kind == "wrong") or ended not in ("answered", "left", "refused"):
            self.wrong.append(f"{ended}: {ask.kind} {str(ask.body)[:200]}")
        if answer and ask.known is not None:
            self.compared += 1
            if answer != right[ask.known]:
                self.wrong.append(f"question {ask.known} ({ask.kind}): {answer}, unspeculated {right[ask.known]}")


def serving(runner: str, port: int, speculated: bool = True) -> AbstractContextManager[Server]:
    """The example's server, with a KV cache too small for its requests; or one without a head."""
    pair = ["--config", "examples/pairs/tiny.yaml"] if speculated else NO_SPECULATION
    command = [sys.executable, "-m", "tests.soak.serve", *pair, "--host", "127.0.0.1", "--port", str(port)]
    command += [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    command += ["--structured-outputs-config", JSON_WITHOUT_BLANKS]
    env = environment() | ({"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"} if runner == "V2" else {})
    return running(command, port, env)


def connected(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0)


def text_of(choice: Any) -> str:
    part = getattr(choice, "message", None) or getattr(choice, "delta", None)
    return (part.content if part else choice.text) or ""


async def answer_of(openai: AsyncOpenAI, ask: Ask) -> Answer:
    """The first choice. Raises openai's errors, and TimeoutError where the client went away."""
    create = (openai.chat.completions if "messages" in ask.body else openai.completions).create
    async with asyncio.timeout(ask.leaves):
        if not ask.stream:
            choice = (await create(**ask.body)).choices[0]
            return text_of(choice), choice.finish_reason
        text, reason = "", None
        async with await create(**ask.body, stream=True) as pieces:
            async for choice in (choice async for piece in pieces for choice in piece.choices if choice.index == 0):
                text, reason = text + text_of(choice), choice.finish_reason or reason
        return text, reason


async def answers(server: Server, asks: list[Ask]) -> dict[int, Answer]:
    """Of each known question."""
    async with connected(server) as openai:
        right = await asyncio.gather(*(answer_of(openai, ask) for ask in asks))
    return {ask.known: answer for ask, answer in zip(asks, right, strict=True) if ask.known is not None}


async def soak(server: Server, traffics: list[Iterator[Ask]], right: dict[int, Answer], seconds: float) -> Tally:
    """A client for each of ``traffics``, all at once."""
    tally, until = Tally(), time.monotonic() + seconds

    async def client(asks: Iterator[Ask]) -> None:
        while time.monotonic() < until:
            ask, answer, ended = next(asks), None, "answered"
            try:
                answer = await answer_of(openai, ask)
            except TimeoutError:
                ended = "left"
            except APIStatusError as error:
                ended = "refused" if error.status_code < 500 else str(error.status_code)
            except APIError as error:
                ended = f"{type(error).__name__}: {error}"
            tally.note(ask, ended, answer, right)

    async with connected(server) as openai:
        await asyncio.gather(*map(client, traffics))
    return tally


async def kill_the_engine(server: Server, asks: list[Ask]) -> list[str]:
    """Kill the engine's process while it answers. What is wrong then: each request must fail, and all processes end."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    async with connected(server) as openai:
        jobs = [asyncio.create_task(answer_of(openai, ask)) for ask in asks]
        await asyncio.sleep(0.3)
        jobs = [job for job in jobs if not job.done()]  # drafts that are looked up make some answers short work
        next(process for process in children if "EngineCore" in " ".join(process.cmdline())).kill()
        _, stuck = await asyncio.wait(jobs, timeout=SECONDS_TO_END)
        wrong = [f"after the engine was killed {len(stuck)} requests are stuck"] * bool(stuck)
        wrong += [f"an answer of a killed engine: {job.result()}" for job in set(jobs) - stuck if not job.exception()]
        for job in stuck:
            job.cancel()
    left = psutil.wait_procs([server.process, *children], SECONDS_TO_END)[1]
    left = [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    return wrong + [f"after the engine was killed there are {left}"] * bool(left)


def run(seconds: float, runner: str, clients: int = 64) -> dict[str, Any]:
    """The whole soak; the report, whose "wrong" is empty where all is well."""
    known, port = greedy_questions(120), free_port()
    with serving(runner, port, speculated=False) as server:
        right = asyncio.run(answers(server, known))
    with serving(runner, port) as server:
        traffics = [traffic(seed, known, filtered=runner == "V1") for seed in range(clients)]
        tally = asyncio.run(soak(server, traffics, right, seconds))
        preemptions = server.metric("vllm:num_preemptions_total")
        wrong = [*tally.wrong, *asyncio.run(kill_the_engine(server, known[:16]))]
    with serving(runner, port) as server:
        again = asyncio.run(answers(server, known[:8]))
    if any(answer != right[number] for number, answer in again.items()):
        wrong.append("answers after the restart are not the unspeculated ones")
    report = {"runner": runner, "seconds": seconds, "clients": clients}
    report |= {name: dict(sorted(getattr(tally, name).items())) for name in ("requests", "ended")}
    return report | {"answers compared": tally.compared, "preemptions": preemptions, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="of traffic (default: 600)")
    parser.add_argument("--runner", choices=("V1", "V2"), default="V1")
    parser.add_argument("--clients", type=int, default=64)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends, too
    report = run(args.seconds, args.runner, args.clients)
    print(json.dumps(report, indent=1))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
