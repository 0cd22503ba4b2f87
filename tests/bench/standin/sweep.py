"""``bench run`` with stand-ins: ``python -m tests.bench.standin.sweep SUITE RESULTS``, ended like the command is."""

import sys
from pathlib import Path

from peagle_vllm.bench import cli, sweep

HERE = Path(__file__).parent
STAND_INS = sweep.Commands(
    server=[sys.executable, "-S", str(HERE / "server.py")], client=[sys.executable, "-S", str(HERE / "client.py")]
)

if __name__ == "__main__":
    sweep.Commands = lambda: STAND_INS  # type: ignore[assignment,misc]
    cli.app(["run", sys.argv[1], "--results", sys.argv[2]])
