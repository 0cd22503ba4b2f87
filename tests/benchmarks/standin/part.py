"""Stands for a part of ``benchmarks.gpu_day``: ``part.py LOG NAME [fails | sleeps | waits FILE | writes FILE]``.

It notes its name and process id in LOG. ``waits`` returns once FILE is there, ``sleeps`` practically never does.
"""

import json
import os
import sys
import time
from pathlib import Path

log, name, *what = sys.argv[1:]
with Path(log).open("a") as out:
    out.write(f"{name} {os.getpid()}\n")
match what:
    case ["fails"]:
        print("Traceback (most recent call last):\nValueError: no such head\nand more noise")
        raise SystemExit(1)
    case ["sleeps"]:
        time.sleep(600)
    case ["waits", file]:
        while not Path(file).exists():
            time.sleep(0.05)
    case ["writes", file]:
        Path(file).write_text(json.dumps({"written": name}))
print(f"a bar without an end of line arm's result: {json.dumps([name])}\nnoise")
