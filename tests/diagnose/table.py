"""Every planted fault and some healthy heads, through ``peagle-vllm diagnose``: ``python -m tests.diagnose.table``.

It continues from the rows that ``--out FILE`` has.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peagle_tools.shared.files import write_whole
from peagle_tools.shared.provenance import provenance
from tests.diagnose.faults import FAULTS, HEALTHY, said

SHOWN = ("tiny-llama-peagle, K=3", "tiny-llama-peagle, K=8", "tiny-llama-peagle-d2t, K=5")
SHOWN += ("tiny-qwen3-peagle, K=4", "tiny-qwen3-peagle, K=7")
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def diagnosed(target: Path, head: Path, *options: object) -> tuple[list[str], float]:
    """What was said, and the seconds it took."""
    words = ["diagnose", "--target", target, "--head", head, "--engine", '{"dtype": "float32"}', "--json", *options]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "peagle_tools.cli", *map(str, words)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    seconds = round(time.monotonic() - began, 1)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    return [
        line.replace(f"{head.parent}/", "").replace(str(target), target.name) for line in said(done.stdout, done.stderr)
    ], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="write the rows here as JSON")
    out: Path = parser.parse_args().out
    known = json.loads(out.read_text()) if out.exists() else {"faults": [], "healthy": []}
    faults = {row["fault"]: row for row in known["faults"]}
    healthy = {row["head"]: row for row in known["healthy"]}

    def keep(row: dict) -> None:
        print(row, flush=True)
        rows = {"faults": list(faults.values()), "healthy": list(healthy.values())}
        what = {"what": (__doc__ or "").splitlines()[0]}
        write_whole(out, json.dumps({**what, **provenance(), **rows}, indent=1) + "\n")

    for name in [name for name in FAULTS if name not in faults]:
        case = FAULTS[name]
        with tempfile.TemporaryDirectory() as folder:
            lines, seconds = diagnosed(*case.write(Path(folder)), *case.options)
        faults[name] = {"fault": name, "named": case.is_named(lines), "said": lines, "seconds": seconds}
        keep(faults[name])
    for name in [name for name in SHOWN if name not in healthy]:
        target, head, k = HEALTHY[name]
        lines, seconds = diagnosed(target, head, "-k", k)
        healthy[name] = {"head": name, "said": lines, "seconds": seconds}
        keep(healthy[name])


if __name__ == "__main__":
    main()
