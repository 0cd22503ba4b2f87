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

from benchmarks import arms
from models.recipe.corpus import SEED
from models.recipe.plan import ASKED_FOR, STAGES


def run(name: str, out: Path) -> None:
    """One stage in a process of its own; publishes the model that it made."""
    stage, work, began = STAGES[name], out / ".build", time.time()
    log = work / f"{name}.log"
    print(f"start   {name}, which writes {log}", flush=True)
    try:
        made = arms.run(stage.function, {}, log, work=str(work), name=name, **stage.options)
    except arms.ArmError as error:
        raise SystemExit(f"stage {name} failed ({error}); its log is {log}") from None
    minutes = round((time.time() - began) / 60, 1)
    found = {**stage.options, **made, "seed": SEED, "minutes": minutes}
    (work / f"{name}.json").write_text(json.dumps(found, indent=2))
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
    parser.add_argument("--out", type=Path, default=arms.ROOT / "models", help="folder that receives the models")
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=f"of: {', '.join(STAGES)}")
    args = parser.parse_args()
    out = args.out.resolve()
    (out / ".build").mkdir(parents=True, exist_ok=True)
    build(args.only or [name for name in STAGES if name not in ASKED_FOR], out)
    if not args.only:
        evaluate = Path(__file__).with_name("evaluate.py")
        subprocess.run([sys.executable, str(evaluate), "--models", str(out)], check=True)


if __name__ == "__main__":
    main()
