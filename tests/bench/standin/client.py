"""Stands for `vllm bench serve`: writes a synthetic result. STANDIN_CLIENT in its environment says what fails.

fails         an error and no result
half          half of the requests failed (STANDIN_CLIENT_FOR_EAGLE: only in that arm)
slow          takes a second before it writes
a number      everything takes so many times as long
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.bench.rawdata import raw

parser = argparse.ArgumentParser()
for name in ("--request-id-prefix", "--max-concurrency", "--result-dir", "--result-filename", "--num-prompts"):
    parser.add_argument(name)
args, _ = parser.parse_known_args()
cell = args.request_id_prefix.removesuffix("-")
arm, depth = cell.split("-k", 1)
for_eagle = os.environ.get("STANDIN_CLIENT_FOR_EAGLE") if arm == "eagle-3" else None
wanted = for_eagle or os.environ.get("STANDIN_CLIENT", "")


def say(line: str) -> None:
    with Path(os.environ["STANDIN_LOG"]).open("a") as log:
        log.write(f"{line}\n")


say(f"client {os.getpid()}")
if wanted == "fails":
    print("Traceback (most recent call last):\nFileNotFoundError: no such data set")
    sys.exit(1)
time.sleep(1.0 if wanted == "slow" else 0.05)
noise = float(wanted) if wanted[:1].isdigit() else 1.0
kind = {"none": "none", "eagle-3": "EAGLE-3"}.get(arm, "P-EAGLE")
k = int(depth.split("-")[0])
result = raw(kind, k, int(args.max_concurrency), prompts=int(args.num_prompts), noise=noise)
if wanted == "half":
    result |= {"completed": result["completed"] // 2, "failed": 6, "errors": ["", "Connection lost"]}
(Path(args.result_dir) / args.result_filename).write_text(json.dumps(result))
say(f"measured {cell}")
