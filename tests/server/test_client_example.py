"""The client example against the server example."""

import subprocess
import sys

from tests.support.serving import ROOT, Server


def test_client_example(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "examples/client.py", server.url], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    chat, completion = done.stdout.removeprefix("--- chat\n").split("--- completion\n")
    assert chat.strip()
    assert completion.strip()
