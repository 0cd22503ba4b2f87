"""``bench run`` with stand-ins: ``python -m tests.bench.standin.sweep SUITE RESULTS``, ended like the command is."""

import sys
from pathlib import Path

from peagle_vllm.bench import cli

HERE = Path(__file__).parent
SERVER, CLIENT = ([sys.executable, "-S", str(HERE / name)] for name in ("server.py", "client.py"))

if __name__ == "__main__":
    from peagle_vllm.bench import client, server

    server.COMMAND, client.COMMAND = SERVER, CLIENT
    cli.app(["run", sys.argv[1], "--results", sys.argv[2]])
