"""``peagle-vllm diagnose --url``: what a running server's counters mean."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.inspect.running import only_line, run


def metrics(drafts: int, *accepted: int, engines: int = 1) -> str:
    """The text of /metrics, each count over ``engines`` engines."""
    lines = ["# TYPE vllm:spec_decode_num_drafts counter"]
    for engine in range(engines):
        where = f'engine="{engine}",model_name="m"'
        lines += [
            f"vllm:spec_decode_num_{name}_total{{{where}}} {count}"
            for name, count in (
                ("drafts", drafts),
                ("draft_tokens", drafts * len(accepted)),
                ("accepted_tokens", sum(accepted)),
            )
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{where},position="{i}"}} {count}.0'
            for i, count in enumerate(accepted)
        ]
    return "\n".join(lines) + "\n"


@contextmanager
def serving(text: str) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


USUAL = (75, 56, 42)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (metrics(100, *USUAL), []),
        (metrics(8, 6, 4, 3), ["8 drafts so far"]),
        (metrics(100, 80, 20, 4), ["position 2 is accepted in 25%", "look at the mask inputs"]),
    ],
)
def test_what_counters_mean(text: str, meant: list[str], monkeypatch: pytest.MonkeyPatch):
    with serving(text) as url:
        ran = run(monkeypatch, "diagnose", "--url", url, "--json")
        shown = run(monkeypatch, "diagnose", "--url", f"{url}/metrics").out
    data = json.loads(ran.out)
    assert ran.code == (1 if meant else 0)
    assert [part in line for part, line in zip(meant, data["meaning"], strict=True)] == [True] * len(meant)
    assert "drafts since it started" in shown and ("nothing looks wrong" in shown) is (not meant)


def test_engines_are_summed(monkeypatch: pytest.MonkeyPatch):
    with serving(metrics(100, *USUAL, engines=2)) as url:
        data = json.loads(run(monkeypatch, "diagnose", "--url", url, "--json").out)
    assert (data["acceptance_length"], data["acceptance"], data["drafts"]) == (2.73, [0.75, 0.56, 0.42], 200)


def test_a_server_that_says_nothing_is_one_line(monkeypatch: pytest.MonkeyPatch):
    with serving("# nothing\n") as url:
        assert "no vllm:spec_decode counters" in only_line(run(monkeypatch, "diagnose", "--url", url))
    assert "cannot be read" in only_line(run(monkeypatch, "diagnose", "--url", url))
