"""Rebuild every tiny target and head from nothing: ``python models/recipe/build.py --out models``.

Stages run as processes of one thread each, two at a time, in the order of their needs. A finished model is moved into
the output folder at once, so that folder always holds models that load; logs and training text are in ``.build`` there.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from graphlib import TopologicalSorter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from plan import ASKED_FOR, SEED, STAGES

from benchmarks import arms

HERE = Path(__file__).resolve().parent


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
    from heads import answers, train_head

    target = work / options.pop("target")
    data = work / f"{target.name}-answers-run"
    if stage.does == "answers":
        return {**answers(target, data, **options), "seed": SEED}
    if "init" in options:
        options["init"] = str(work / options["init"])
    return {**stage.options, **train_head(target, data, place, **options), "seed": SEED}


def run(name: str, out: Path) -> None:
    """One stage in a process of its own; publishes the model that it made."""
    work = out / ".build"
    began, log, figures = time.time(), work / f"{name}.log", work / f"{name}.json"
    print(f"start   {name}, which writes {log}", flush=True)
    command = [sys.executable, str(HERE / "build.py"), "--out", str(out), "--stage", name]
    with log.open("w") as written:
        done = subprocess.run(command, stdout=written, stderr=written, env=arms.environment({}), check=False)
    if done.returncode:
        raise SystemExit(f"stage {name} failed, its log ends:\n{log.read_text()[-3000:]}")
    minutes = round((time.time() - began) / 60, 1)
    figures.write_text(json.dumps({**json.loads(figures.read_text()), "minutes": minutes}, indent=2))
    if (work / name).is_dir():
        publish(work / name, out / name)
    print(f"done    {name} in {minutes} min", flush=True)


def publish(folder: Path, place: Path) -> None:
    """Put a copy of ``folder`` at ``place``; what was there is replaced by two renames."""
    fresh, old = place.with_name(f".{place.name}.new"), place.with_name(f".{place.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(folder, fresh)
    for file in fresh.rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors files come readable by their owner only
    if place.exists():
        place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def build(names: list[str], out: Path) -> None:
    """Run the stages ``names``; a stage waits for those of its needs that are among them."""
    order = TopologicalSorter({name: set(STAGES[name].needs) & set(names) for name in names})
    order.prepare()
    running: dict[Future[None], str] = {}
    with ThreadPoolExecutor(2) as pool:
        while order.is_active():
            running |= {pool.submit(run, name, out): name for name in order.get_ready()}
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                future.result()
                order.done(running.pop(future))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent, help="folder that receives the models")
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=f"of: {', '.join(STAGES)}")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    out = args.out.resolve()
    work = out / ".build"
    work.mkdir(parents=True, exist_ok=True)
    if args.stage:
        (work / f"{args.stage}.json").write_text(json.dumps(run_stage(args.stage, work)))
        return
    build(args.only or [name for name in STAGES if name not in ASKED_FOR], out)
    if not args.only:
        subprocess.run([sys.executable, str(HERE / "evaluate.py"), "--models", str(out)], check=True)


if __name__ == "__main__":
    main()
