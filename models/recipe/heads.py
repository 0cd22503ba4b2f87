"""Heads of the tiny targets: ``peagle-vllm train`` makes their data and P-EAGLE, speculators' own trainer EAGLE-3."""

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.tiny_heads import AS_SHIPPED, STEP_TOKENS, make_data, train


def answers(target: Path, folder: Path, prompts: int, port: int) -> dict[str, Any]:
    """Let ``target`` answer ``prompts`` prompts, from which all its heads learn, in ``folder``; their figures."""
    rows = (make_data(str(target), folder, prompts, port).parent / "answers.jsonl").read_text().splitlines()
    return {"prompts": len(rows), "answer_tokens": sum(sum(json.loads(row)["loss_mask"]) for row in rows)}


def train_head(target: Path, data: Path, place: Path, steps: int, seed: int, **how: Any) -> dict[str, Any]:
    """Train a head on ``data`` in ``place``-run, and put what vLLM reads of it into ``place``; the figures of the run.

    Args:
        how: attributes of ``Arm`` that are not those of the shipped P-EAGLE heads.
    """
    arm = replace(AS_SHIPPED, **how)
    run = place.with_name(f"{place.name}-run")
    shutil.rmtree(run, ignore_errors=True)
    found = train(str(target), asdict(arm), seed, steps, str(data / "run/data"), str(run))
    head = Path(found.pop("head"))
    place.mkdir(exist_ok=True)
    shutil.copy(head / "model.safetensors", place)
    config = json.loads((head / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = f"models/{target.name}"  # not its place on this machine
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if arm.by == "ours":
        held_out = json.loads((run / "run/log.jsonl").read_text().splitlines()[-1])["held_out"]
        found["accuracy"] = held_out["accuracy"]
    shape = {"kind": arm.kind, "layers": arm.layers, "trained_depth": arm.depths, "muon_lr": arm.muon_lr}
    return shape | {"draft_vocab": arm.draft_vocab, "seen": f"{steps:,} steps of {STEP_TOKENS:,} tokens"} | found
