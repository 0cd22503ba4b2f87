"""Every planted fault and some healthy heads, through ``peagle-vllm diagnose``: ``python -m tests.diagnose.table``."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.arms import parser, write_result
from peagle_vllm.provenance import provenance
from tests.diagnose.faults import FAULTS, HEALTHY, said

SHOWN = (("tiny-llama-peagle", 3), ("tiny-llama-peagle", 8), ("tiny-llama-peagle-d2t", 5))
SHOWN += (("tiny-qwen3-peagle", 4), ("tiny-qwen3-peagle", 7))
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def diagnosed(target: Path, head: Path, *options: object) -> tuple[list[str], float]:
    """What was said, and the seconds it took."""
    words = ["diagnose", "--target", target, "--head", head, "--engine", '{"dtype": "float32"}', "--json", *options]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "peagle_vllm.cli", *map(str, words)],
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
    args = parser(__doc__).parse_args()
    faults, healthy = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, case) in enumerate(FAULTS.items()):
            target, head = case.write(Path(folder) / str(number))
            lines, seconds = diagnosed(target, head, *case.options)
            faults.append({"fault": name, "named": case.is_named(lines), "said": lines, "seconds": seconds})
            print(faults[-1], flush=True)
    for name in (f"{head}, K={k}" for head, k in SHOWN):
        target, head, k = HEALTHY[name]
        lines, seconds = diagnosed(target, head, "-k", k)
        healthy.append({"head": name, "said": lines, "seconds": seconds})
        print(healthy[-1], flush=True)
    write_result(args.out, __doc__, {**provenance(), "faults": faults, "healthy": healthy})


if __name__ == "__main__":
    main()
