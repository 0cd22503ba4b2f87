"""Three learning rates for each head of the real target, on a tenth of its steps: ``python models/recipe/rates.py``.

The hidden states are those of ``make real-heads``. A head is judged by its AL in vLLM on held-out prompts, of which it
learned nothing. What is trained is kept.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks import arms
from benchmarks.real import Engine, RealArm, al_of, live
from models.recipe.heads import changed
from models.recipe.real import HEADS, REAL, train
from peagle_tools.shared.provenance import provenance
from peagle_tools.train.config import Config, read_config
from peagle_tools.train.documents import read_rows
from peagle_tools.train.pipeline import settings

TIMES, STEPS, K, MAX_TOKENS = (0.5, 1.0, 2.0), 50, 3, 128  # times both rates of peagle.yaml


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
    return {"head": head, **rates, **al_of(found), "settings": settings(config)["run"]}


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--run", type=Path, help="of `make real-heads` (default: as peagle.yaml says)")
    args, found_by = parser.parse_args(), provenance()
    base, rows = read_config(REAL / "peagle.yaml"), []
    run = (args.run or base.run).absolute()
    for head in HEADS:
        for times in TIMES:
            of = changed(base, folder=str(run / f"rate-{head}-{times}"), **HEADS[head])
            every = dict.fromkeys(("checkpoint", "replay"), STEPS)
            of = changed(of, optimizer={"lr": base.optimizer.lr * times, "steps": STEPS}, every=every)
            of = changed(of, speculators={"muon_lr": base.speculators["muon_lr"] * times})
            rows.append(arms.kept(Path(f"{of.run}.json"), lambda head=head, of=of: measure(head, of)))
            print({name: value for name, value in rows[-1].items() if name != "settings"}, flush=True)
    arms.write_result(args.out, __doc__, {"steps": STEPS, "k": K, "max_tokens": MAX_TOKENS, "rows": rows} | found_by)


if __name__ == "__main__":
    main()
