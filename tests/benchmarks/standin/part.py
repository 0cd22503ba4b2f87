"""In place of a part of ``benchmarks.gpu_day``: ``part.py LOG NAME OUT [fails | sleeps | waits FILE]``.

It notes its name and process id in LOG and writes [NAME] to OUT. ``waits`` returns once FILE is there, ``sleeps``
practically never does.
"""

import json
import os
import sys
import time
from pathlib import Path

log, name, result, *what = sys.argv[1:]
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
Path(result).write_text(json.dumps([name]))
