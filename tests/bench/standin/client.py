"""Stands for `vllm bench serve`: writes a synthetic result. STANDIN_CLIENT in its environment says what fails.

fails         an error and no result
half          half of the requests failed (STANDIN_CLIENT_FOR_EAGLE: only in that arm)
noise:F       everything takes F times as long
slow          takes a second before it writes
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
wanted = os.environ.get("STANDIN_CLIENT", "")
cell = args.request_id_prefix.removesuffix("-")
if cell.startswith("eagle"):
    wanted = os.environ.get("STANDIN_CLIENT_FOR_EAGLE", wanted)
wanted, _, factor = wanted.partition(":")
factor = float(factor or 1)
log = Path(os.environ["STANDIN_LOG"])


def say(line: str) -> None:
    with log.open("a") as out:
        out.write(f"{line}\n")


say(f"client {os.getpid()}")
if wanted == "fails":
    print("Traceback (most recent call last):\nFileNotFoundError: no such data set")
    sys.exit(1)
time.sleep(1.0 if wanted == "slow" else 0.05)
k = int(cell.split("-k")[1].split("-")[0])
kind = {"none": "none", "eagle": "EAGLE-3"}.get(cell.split("-")[0], "P-EAGLE")
noise = factor if wanted == "noise" else 1.0
result = raw(kind, k, int(args.max_concurrency), prompts=int(args.num_prompts), noise=noise)
if wanted == "half":
    result |= {"completed": result["completed"] // 2, "failed": 6, "errors": ["", "Connection lost"]}
(Path(args.result_dir) / args.result_filename).write_text(json.dumps(result))
say(f"measured {cell}")
