"""``peagle-vllm diagnose --url``: what a running server's counters mean."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.inspect.running import only_line, run


def metrics_of(drafts: int, *accepted: int) -> str:
    """The text of /metrics of two engines, which have these counts together."""
    counts = {'drafts_total{engine="%d"}': drafts}
    for i, count in enumerate(accepted):
        counts[f'accepted_tokens_per_pos_total{{engine="%d",position="{i}"}}'] = count
    lines = ["# TYPE vllm:spec_decode_num_drafts counter"]
    for name, count in counts.items():
        lines += [f"vllm:spec_decode_num_{name % engine} {count // 2 + engine * (count % 2)}.0" for engine in (0, 1)]
    return "\n".join(lines) + "\n"


def serve(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a server whose metrics are ``text``."""

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        assert url == "http://a-server:8000/metrics"
        return io.BytesIO(text.encode())

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return "http://a-server:8000"


@pytest.mark.parametrize(
    ("counts", "meant"),
    [
        ((100, 75, 56, 42), []),
        ((8, 6, 4, 3), ["8 drafts so far"]),
        ((100, 80, 20, 4), ["position 2 is accepted in 25%", "look at the mask inputs"]),
    ],
)
def test_what_counters_mean(counts: tuple[int, ...], meant: list[str], monkeypatch: pytest.MonkeyPatch):
    url = serve(metrics_of(*counts), monkeypatch)
    ran = run(monkeypatch, "diagnose", "--url", url, "--json")
    shown = run(monkeypatch, "diagnose", "--url", f"{url}/metrics").out
    data, (drafts, *accepted) = json.loads(ran.out), counts
    assert (data["drafts"], data["acceptance"]) == (drafts, [count / drafts for count in accepted])
    assert data["acceptance_length"] == 1 + sum(accepted) / drafts
    assert ran.code == (1 if meant else 0)
    assert [part in line for part, line in zip(meant, data["meaning"], strict=True)] == [True] * len(meant)
    assert "drafts since it started" in shown and ("nothing looks wrong" in shown) is (not meant)


def test_prompts_are_answered_there_and_measured_by_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps = {"num_spec_tokens": 2, "num_spec_steps": 50, "per_step_drafted": [2] * 50}
    answers, asked = [], []
    for length, accepted in ((300, 2), (4000, 0)):
        metrics = {"speculative_decoding": steps | {"per_step_accepted": [accepted] * 50}}
        choice = {"token_ids": [7] * (1 + 50 * (accepted + 1))}
        answers.append({"choices": [choice], "prompt_token_ids": [*range(length)], "metrics": metrics})

    def urlopen(request: Any, *_: object, **__: object) -> io.BytesIO:
        if isinstance(request, str):
            return io.BytesIO(metrics_text.encode())
        asked.append((request.full_url, json.loads(request.data) if request.data else None))
        answer = {"data": [{"id": "m"}]} if request.data is None else answers[len(asked) - 2]
        return io.BytesIO(json.dumps(answer).encode())

    metrics_text = metrics_of(100, 75, 56)
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    (tmp_path / "prompts").write_text("short\nlong\n")
    command = ("diagnose", "--url", "http://s/", "--prompts", tmp_path / "prompts")
    data = json.loads(run(monkeypatch, *command, "--json").out)
    assert {last: seen["acceptance_length"] for last, seen in data["by_context"].items()} == {"511": 3.0, "4095": 1.0}
    assert {n: seen["drafts"] for n, seen in data["by_repeated"].items()} == {"1": 3, "2": 1, "3": 2, "4": 1, "5": 93}
    assert "a window may help" in data["meaning"][-1]
    body = {"model": "m", "max_tokens": 128, "temperature": 0, "return_token_ids": True}
    messages = [{"role": "user", "content": "long"}]
    assert asked[2] == ("http://s/v1/chat/completions", body | {"messages": messages})
    asked.clear()
    assert "up to 4095" in run(monkeypatch, *command).out
    asked.clear()
    answers[1]["metrics"] = None
    assert "vLLM gives them with --per-request-spec-decode-metrics" in only_line(run(monkeypatch, *command))


def test_a_server_that_says_nothing_is_one_line(monkeypatch: pytest.MonkeyPatch):
    assert "cannot be read" in only_line(run(monkeypatch, "diagnose", "--url", "http://127.0.0.1:9"))
    url = serve("# nothing\n", monkeypatch)
    assert "no vllm:spec_decode counters" in only_line(run(monkeypatch, "diagnose", "--url", url))
