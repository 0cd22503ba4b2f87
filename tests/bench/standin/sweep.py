"""``peagle-vllm`` with stand-ins: ``python -m tests.bench.standin.sweep bench run SUITE --results RESULTS``."""

import sys
from pathlib import Path

from peagle_tools.cli import app

HERE = Path(__file__).parent
SERVER, CLIENT = ([sys.executable, "-S", str(HERE / name)] for name in ("server.py", "client.py"))

if __name__ == "__main__":
    from peagle_tools.bench import client
    from peagle_tools.shared import server

    server.COMMAND, client.COMMAND = SERVER, CLIENT
    app()
