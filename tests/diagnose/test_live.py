"""``peagle-vllm diagnose --url``: what a running server's counters mean."""

import io
import json

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
    ("counts", "unusual"),
    [
        ((100, 75, 56, 42), []),
        ((8, 1, 0, 0), []),  # too few to judge
        ((100, 80, 20, 4), ["position 2 is accepted in 25%", "look at the mask inputs"]),
    ],
)
def test_what_counters_mean(counts: tuple[int, ...], unusual: list[str], monkeypatch: pytest.MonkeyPatch):
    url = serve(metrics_of(*counts), monkeypatch)
    ran = run(monkeypatch, "diagnose", "--url", url, "--json")
    shown = run(monkeypatch, "diagnose", "--url", f"{url}/metrics").out
    data, (drafts, *accepted) = json.loads(ran.out), counts
    assert (data["drafts"], data["acceptance"]) == (drafts, [count / drafts for count in accepted])
    assert data["acceptance_length"] == 1 + sum(accepted) / drafts
    assert ran.code == bool(unusual) == ("unusual" in shown.partition("\n\n")[2].partition("usual")[2])
    assert [part in line for part, line in zip(unusual, data["unusual"], strict=True)] == [True] * len(unusual)


def test_a_server_that_says_nothing_is_one_line(monkeypatch: pytest.MonkeyPatch):
    assert "cannot be read" in only_line(run(monkeypatch, "diagnose", "--url", "http://127.0.0.1:9"))
    url = serve("# nothing\n", monkeypatch)
    assert "no vllm:spec_decode counters" in only_line(run(monkeypatch, "diagnose", "--url", url))
