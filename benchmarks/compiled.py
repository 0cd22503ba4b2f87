"""Which kernels Triton compiles in a process, or loads compiled, and how long that takes."""

import json
import os
from pathlib import Path
from typing import Any

FILE = "PEAGLE_COMPILED"  # names the file that gets a line of JSON for each kernel
names: list[str] = []  # of those that this process has compiled or loaded


def note_kernels() -> None:
    """From now on each kernel's name, seconds, and whether it came out of the cache, is in the file that FILE names."""
    if FILE not in os.environ:
        return
    from triton import knobs

    file = Path(os.environ[FILE])

    def note(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        names.append(getattr(src, "name", "?"))
        entry = {"kernel": names[-1], "seconds": round(times.total * 1e-6, 2), "cached": cache_hit}
        with file.open("a") as out:
            out.write(json.dumps(entry) + "\n")

    knobs.compilation.listener = note
