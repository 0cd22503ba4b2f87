"""Learning rates of the real target's heads, or shapes of P-EAGLE, on a tenth of their steps.

``python models/recipe/rates.py`` trains each head at three rates, with ``--shapes`` P-EAGLE with its selector with
other numbers of layers and draft tokens. The hidden states are those of ``make real-heads``. A head is judged by its
AL in vLLM on held-out prompts, of which it learned nothing. What is trained is kept.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks import arms
from benchmarks.real import TARGET, Engine, RealArm, al_of, live
from models.recipe.real import HEADS, changed, settings_here, train
from peagle_tools.shared.provenance import provenance
from peagle_tools.sharpen.reduce import step_bytes
from peagle_tools.train.config import Config
from peagle_tools.train.documents import read_rows
from peagle_tools.train.pipeline import settings
from peagle_vllm.heads.head import read_head

TIMES, STEPS, K, MAX_TOKENS = (0.5, 1.0, 2.0), 50, 3, 128  # times both rates of peagle.yaml
SHAPES: tuple[dict[str, Any], ...] = ({}, {"layers": 1}, {"layers": 4}, {"draft_vocab": 4096})


def counts(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """In how many steps 0, 1 .. K drafts were accepted, for each prompt."""
    from vllm import SamplingParams

    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.llm.generate(given, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)
    return [engine.counts(output.outputs[0]) for output in outputs]


def measure(head: str, config: Config) -> dict[str, Any]:
    """Train a head, and its AL."""
    folder, named = train(head, config), config.run / head  # by its name an arm knows that it is EAGLE-3
    named.unlink(missing_ok=True)
    named.symlink_to(folder.resolve())
    rows = read_rows(config).with_format(None)
    held_out = rows.select(range(len(rows) - config.data.held_out, len(rows)))
    prompts = [row["input_ids"][: row["loss_mask"].index(1)] for row in held_out]
    arm = RealArm(config.run.name, str(named), K, selector=config.selector is not None)
    with live(arm) as call:
        found = np.asarray(call(counts, prompts))
    rates = {"lr": config.optimizer.lr, "muon_lr": config.speculators["muon_lr"]}
    size = {"bytes": step_bytes(read_head(folder)), "target_bytes": (TARGET / "model.safetensors").stat().st_size}
    return {"head": head, **rates, **size, **al_of(found), "settings": settings(config)["run"]}


def runs(base: Config, folder: Path, of_shapes: bool) -> Iterator[tuple[str, Config]]:
    """The head and the settings of each run."""
    if of_shapes:
        for shape in SHAPES:
            name = "-".join(["shape", *map(str, shape.values())])
            yield "peagle", changed(base, folder=str(folder / name), head=shape)
    for head, times in product(HEADS, () if of_shapes else TIMES):
        of = changed(base, folder=str(folder / f"rate-{head}-{times}"), **HEADS[head])
        of = changed(of, optimizer={"lr": base.optimizer.lr * times})
        yield head, changed(of, speculators={"muon_lr": base.speculators["muon_lr"] * times})


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--run", type=Path, help="of a sitting of `make real-heads` (default: the first)")
    parser.add_argument("--shapes", action="store_true", help="measure shapes instead")
    args, found_by = parser.parse_args(), provenance()
    rows, every = [], dict.fromkeys(("checkpoint", "replay"), STEPS)
    base = changed(settings_here(), optimizer={"steps": STEPS}, every=every)
    for head, of in runs(base, (args.run or base.run / "first").absolute(), args.shapes):
        rows.append(arms.kept(Path(f"{of.run}.json"), lambda head=head, of=of: measure(head, of)))
        print({name: value for name, value in rows[-1].items() if name != "settings"}, flush=True)
    arms.write_result(args.out, __doc__, {"steps": STEPS, "k": K, "max_tokens": MAX_TOKENS, "rows": rows} | found_by)


if __name__ == "__main__":
    main()
