"""Rebuild every tiny model from nothing: ``python models/recipe/build.py --out models``.

Stages run as processes of one thread each, ``--jobs`` at a time, in the order of their needs. A finished model is
moved into the output folder at once, so that folder always holds models that load.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from graphlib import TopologicalSorter
from pathlib import Path

from plan import ASKED_FOR, SEED, STAGES
from publish import publish

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def run_stage(name: str, work: Path) -> dict:
    """Run one stage in this process; its output goes to ``work / name``, its figures are returned."""
    stage, place = STAGES[name], work / name
    if stage.does == "tokenizer":
        from tokens import train_tokenizer

        train_tokenizer(work / "tokenizer-files", SEED)
        return {"seed": SEED}
    import torch

    torch.set_num_threads(1)
    options = dict(stage.options)
    if stage.does == "target":
        from target import train_target

        return train_target(options["kind"], work / "tokenizer-files", place, options["steps"], SEED)
    target = work / options.pop("target")
    if stage.does == "sharpen":
        from sharpen import sharpen

        found = sharpen(target, work / stage.needs[0], place)
        return {**stage.options, **{name: found[name] for name in ("chosen", "drafts")}}
    from heads import answers, train_head

    data = work / f"{target.name}-answers-run"
    if stage.does == "answers":
        return {**answers(target, data, **options), "seed": SEED}
    if "init" in options:
        options["init"] = str(work / options["init"])
    return {**stage.options, **train_head(target, data, place, **options), "seed": SEED}


def run(name: str, work: Path, out: Path) -> None:
    """One stage in a process of its own, with its log in ``work``; publishes the model that it made."""
    began, log, figures = time.time(), work / f"{name}.log", work / f"{name}.json"
    print(f"start   {name}, which writes {log}", flush=True)
    command = [sys.executable, str(HERE / "build.py"), "--work", str(work), "--stage", name]
    with log.open("w") as written:
        done = subprocess.run(command, stdout=written, stderr=written, env={**os.environ, **ENVIRONMENT}, check=False)
    if done.returncode:
        raise SystemExit(f"stage {name} failed, its log ends:\n{log.read_text()[-3000:]}")
    minutes = round((time.time() - began) / 60, 1)
    figures.write_text(json.dumps({**json.loads(figures.read_text()), "minutes": minutes}, indent=2))
    publish(work / name, out / name)
    print(f"done    {name} in {minutes} min", flush=True)


def build(names: list[str], work: Path, out: Path, jobs: int) -> None:
    """Run the stages ``names``; a stage waits for those of its needs that are among them."""
    order = TopologicalSorter({name: set(STAGES[name].needs) & set(names) for name in names})
    order.prepare()
    running: dict[Future[None], str] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while order.is_active():
            running |= {pool.submit(run, name, work, out): name for name in order.get_ready()}
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                future.result()
                order.done(running.pop(future))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent, help="folder that receives the models")
    parser.add_argument("--work", type=Path, help="folder for logs and training text (default: OUT/.build)")
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=f"of: {', '.join(STAGES)}")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, one thread each")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    work = (args.work or args.out / ".build").resolve()
    work.mkdir(parents=True, exist_ok=True)
    if args.stage:
        (work / f"{args.stage}.json").write_text(json.dumps(run_stage(args.stage, work)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    build(args.only or [name for name in STAGES if name not in ASKED_FOR], work, args.out.resolve(), args.jobs)
    if not args.only:
        evaluate = [sys.executable, str(HERE / "evaluate.py"), "--models", str(args.out), "--work", str(work)]
        subprocess.run(evaluate, check=True)


if __name__ == "__main__":
    main()
