"""Heads trained on the same data for as many steps, in several ways: ``make compare-heads``.

P-EAGLE by ``peagle-vllm train run`` with speculators' default loss and with others, P-EAGLE and EAGLE-3 by speculators'
own trainer. All begin as the target's last layers. What is finished stays: the same command goes on.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from benchmarks import arms
from benchmarks.engines import prepare_process, tiny_pair
from benchmarks.heldout import read_prompts
from peagle_vllm.acceptance import read_engine
from peagle_vllm.provenance import provenance

MODELS = arms.ROOT / "models"
KS, PROMPTS, GROUP, MAX_TOKENS = (3, 5, 7), 48, 4, 96  # held out; of a standard error's groups; of an answer
SEEDS = {"tiny-llama": (0, 1, 2), "tiny-qwen3": (0,)}
GAMMA, TOP = 0.8, 32


@dataclass(frozen=True)
class Arm:
    """How a head is trained.

    Attributes:
        loss: speculators' name of it.
        weighted: a row of depth d counts GAMMA^d.
        top: of the target's distribution, the TOP likeliest tokens only.
        by: our trainer, speculators' own, or the loop that made the heads of models/.
        layers, muon_lr: of EAGLE-3 as RESULTS.json has it: about as many operations an exchange, and the best rate.
    """

    loss: str = "kl_div"
    weighted: bool = False
    top: bool = False
    by: str = "ours"
    kind: str = "peagle"
    layers: int = 4
    muon_lr: float = 0.01


BASE = "P-EAGLE"
AS_SHIPPED = Arm('{"kl_div": 0.5, "ce": 0.5}')  # the loss of the heads in models/
ARMS = {
    BASE: Arm(),
    "P-EAGLE, speculators' trainer": Arm(by="speculators"),
    "EAGLE-3, speculators' trainer": Arm(by="speculators", kind="eagle3", layers=1, muon_lr=0.04),
    "P-EAGLE, the loop that made the heads of models/": Arm(by="recipe"),
    "kl_div and ce, half each": AS_SHIPPED,
    "tv": Arm("tv"),
    "nla": Arm("nla"),
    "lk_hybrid": Arm("lk_hybrid"),
    f"kl_div, rows of depth d weighted {GAMMA}^d": Arm(weighted=True),
    f"kl_div, the target's {TOP} likeliest tokens": Arm(top=True),
}
OF_EVERY_SEED = tuple(ARMS)[:3]


def write_config(target: str, folder: Path, arm: Arm, seed: int, steps: int) -> Path:
    """peagle.yaml of an arm in ``folder``."""
    settings: dict[str, Any] = {
        "target": str(MODELS / target),
        "data": {
            "prompts": ["prompts.jsonl"],
            "held_out": PROMPTS,
            "max_tokens": 128,
            "endpoint": "http://127.0.0.1:8377/v1",
        },
        "head": {"layers": arm.layers, "depths": 8, "aux_layers": [2, 5, 7], "mask_token": 6, "init": "target"},
        "step": {"tokens": 1024, "cod": [0.7, 0.2], "dtype": "float32"},
        "optimizer": {"name": "muon", "lr": arm.muon_lr / 10, "steps": steps, "seed": seed},
        "every": {"checkpoint": steps, "replay": steps},
        "engine": {"max_model_len": 1024, "max_num_seqs": 64, "enforce_eager": True, "kv_cache_memory_bytes": 2**29},
        "speculators": {"num_workers": 0, "muon_lr": arm.muon_lr, "loss_fn": arm.loss},
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "peagle.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def write_prompts(folder: Path, count: int) -> Path:
    """The held-out prompts, then ``count`` of those that the tiny models have always been trained on."""
    sys.path.append(str(MODELS / "recipe"))
    from corpus import pieces
    from plan import SEED

    held = (MODELS / "prompts/heldout.jsonl").read_text().splitlines()[:PROMPTS]
    texts = [json.loads(line)["prompt"] for line in held]
    texts += [piece.prompt for piece in pieces(held_out=False, seed=SEED)[:count]]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def make_data(target: str, folder: Path, steps: int, count: int) -> Path:
    """The target's answers to the prompts and their hidden states, for all arms; their folder."""
    file = write_config(target, folder, ARMS[BASE], 0, steps)
    prompts, out = write_prompts(folder, count), folder / "run/prompts.jsonl"
    for words in (
        ["prompts", prompts, "--pii", "none", "--out", out],
        ["answers", file],
        ["data", file],
        ["states", file],
    ):
        subprocess.run([sys.executable, "-m", "peagle_vllm.cli", "train", *map(str, words)], check=True)
    return folder / "run/data"


def train(target: str, arm: dict[str, Any], seed: int, steps: int, data: str, folder: str) -> dict[str, Any]:
    """Train a head in this process; its folder and the seconds that it took."""
    import torch

    from peagle_vllm.train.config import read_config
    from peagle_vllm.train.run import train as train_ours

    torch.set_num_threads(1)
    how = Arm(**arm)
    file = write_config(target, Path(folder), how, seed, steps)
    (file.parent / "run").mkdir(exist_ok=True)
    if not (link := file.parent / "run/data").exists():
        link.symlink_to(data)
    config, began = read_config(file), time.process_time()
    with loss_of(how):
        if how.by == "ours":
            head = train_ours(config).checkpointer.path / "best"
        else:
            head = train_theirs(config, how) if how.by == "speculators" else train_as_recipe(config, target)
    return {"head": str(head), "seconds": round(time.process_time() - began)}


@contextmanager
def loss_of(arm: Arm) -> Iterator[None]:
    """Losses that speculators has not: each of its own, of a row's depth or of some of the target's tokens."""
    from peagle_vllm.train import head

    def metrics(logits: Any, targets: Any, mask: Any, anchor: Any, depth: Any, num: int, losses: Any) -> Any:
        least = targets.topk(TOP).values[..., -1:]
        weight = GAMMA**depth if arm.weighted else 1

        def changed(loss: Any) -> Any:
            of = targets.masked_fill(targets < least, float("-inf")) if arm.top else targets
            return lambda logits, _: loss(logits, of) * weight

        changed_losses = {name: (changed(loss), share) for name, (loss, share) in losses.items()}
        return theirs(logits, targets, mask, anchor, depth, num, changed_losses)

    theirs = head.compute_metrics
    with patch.object(head, "compute_metrics", metrics) if arm.weighted or arm.top else ExitStack():
        yield


def train_theirs(config: Any, arm: Arm) -> Path:
    """speculators' own command in this process, without a GPU; the folder of its head."""
    from datasets import load_from_disk
    from safetensors.torch import load_file, save_file
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    from peagle_vllm.train import cpu
    from peagle_vllm.train.run import to_options
    from peagle_vllm.train.warm_start import begin_as_target

    class OnCpu(cli.Trainer):
        def setup_trainer(self) -> None:
            super().setup_trainer()
            self.local_rank = self.device_type = "cpu"

    def begun(*args: Any) -> Any:
        head = build(*args).float()
        begin_as_target(head, config.target)
        return head

    cpu.setup()
    rows = len(load_from_disk(str(config.data_folder)))
    flat = to_options(config).flatten() | {
        "speculator_type": arm.kind,
        "epochs": 1,
        "max_steps": config.optimizer.steps,
        "train_data_ratio": (rows - PROMPTS + 0.5) / rows,
        "max_anchors": config.step.tokens,
        "ttt_steps": config.head.depths,
        "loss_implementation": "eager",
    }
    build = cli.build_draft_model
    with patch.object(cli, "Trainer", OnCpu), patch.object(cli, "build_draft_model", begun):
        cli.main(TrainConfig.from_sources(cli=flat, argv=[]))
    head = config.run / "checkpoints/0"
    weights = load_file(head / "model.safetensors")
    rounded = {name: value.bfloat16() if value.is_floating_point() else value for name, value in weights.items()}
    save_file(rounded, head / "model.safetensors", {"format": "pt"})  # as ours are
    return head


def train_as_recipe(config: Any, target: str) -> Path:
    """As many tokens by the recipe's own loop, loss and Muon; the folder of its head."""
    import torch

    sys.path.append(str(MODELS / "recipe"))
    from datasets import load_from_disk
    from heads import EXCHANGES_A_STEP, HeadPlan, train_head

    rows = load_from_disk(str(config.data_folder)).with_format(None)
    rows = rows.select(range(len(rows) - PROMPTS))
    exchanges = [(row["loss_mask"].index(1), torch.tensor(row["input_ids"], dtype=torch.int16)) for row in rows]
    torch.save(exchanges, config.run / "exchanges.pt")
    tokens = config.optimizer.steps * config.step.tokens / (sum(rows["seq_len"]) / len(rows))
    plan = HeadPlan(
        "recipe", "peagle", target, config.head.layers, config.head.depths, round(tokens / EXCHANGES_A_STEP)
    )
    train_head(plan, MODELS / target, config.run / "exchanges.pt", config.run / "head", config.optimizer.seed)
    return config.run / "head"


def measure(target: str, head: str, num_k: int, parallel: bool, count: int = PROMPTS) -> list[float]:
    """AL of each group of the first ``count`` held-out prompts, greedy, in this process."""
    prepare_process()
    from vllm import LLM, SamplingParams

    arguments = tiny_pair(target, None, num_k)
    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": num_k, "parallel_drafting": parallel}
    arguments |= {"max_model_len": 1024, "max_num_seqs": GROUP, "disable_log_stats": False}
    llm, found = LLM(**arguments | {"speculative_config": speculative}), []
    prompts = read_prompts(llm, MODELS / "prompts/heldout.jsonl", PROMPTS)
    for at in range(0, count, GROUP):
        before = read_engine(llm)
        llm.generate(prompts[at : at + GROUP], SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
        found.append(round(read_engine(llm).since(before).length, 4))
    return found


def mean(lengths: Iterable[float]) -> tuple[float, float]:
    """Of groups, and its standard error."""
    lengths = list(lengths)
    return statistics.mean(lengths), statistics.stdev(lengths) / len(lengths) ** 0.5


def published(result: dict[str, Any]) -> arms.Published:
    """A row for each way: AL for each target and K, and beside it how much that is more than ``BASE`` has."""
    found: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    for row in result["rows"]:
        for num_k, groups in row["al"].items():
            found.setdefault((row["way"], row["target"], int(num_k)), {})[row["seed"]] = groups

    def cell(way: str, target: str, num_k: int) -> str:
        here, base = found.get((way, target, num_k), {}), found.get((BASE, target, num_k), {})
        if not here:
            return ""
        of_groups = [statistics.mean(groups) for groups in zip(*here.values(), strict=True)]
        length, error = mean(of_groups)
        if way == BASE or not set(here) <= set(base):
            return f"{length:.2f} ± {error:.2f}"
        others = [statistics.mean(groups) for groups in zip(*(base[seed] for seed in here), strict=True)]
        more, error = mean(a - b for a, b in zip(of_groups, others, strict=True))
        return f"{length:.2f} ({more:+.2f} ± {error:.2f})"

    cells = [(target, num_k) for target in SEEDS for num_k in KS]
    ways = dict.fromkeys(row["way"] for row in result["rows"])
    rows = [(way, *(cell(way, *of) for of in cells)) for way in ways]
    columns = ("way", *(f"{target}, K = {num_k}" for target, num_k in cells))
    notes = (
        f"{result['steps']} steps of 1,024 tokens; {PROMPTS} held-out prompts, up to {MAX_TOKENS} tokens, greedy",
        f"±: one standard error over groups of {GROUP} prompts; in brackets the difference to {BASE} of the same seeds",
        f"the first three ways on tiny-llama are means of {len(SEEDS['tiny-llama'])} seeds",
    )
    return columns, rows, "; ".join(notes)


def main() -> int:
    parser = arms.parser(__doc__)
    parser.add_argument("--work", type=Path, default=MODELS / ".build/compare")
    parser.add_argument("--steps", type=int, default=150, help="of each head")
    parser.add_argument("--prompts", type=int, default=2000, help="that the heads learn from")
    args = parser.parse_args()
    report: dict[str, Any] = {"steps": args.steps, "prompts": args.prompts, "rows": []}
    if args.out and args.out.exists():
        before = json.loads(args.out.read_text())
        if any(before[name] != report[name] for name in ("steps", "prompts")):
            raise SystemExit(f"{args.out}: is of other --steps or --prompts; give another --out")
        report["rows"] = before["rows"]
    done = {(row["target"], row["way"], row["seed"]) for row in report["rows"]}
    jobs = [
        (target, way, seed)
        for way in ARMS
        for target, seeds in SEEDS.items()
        for seed in seeds
        if seed == 0 or way in OF_EVERY_SEED
    ]
    data: dict[str, Path] = {}
    for target, way, seed in (job for job in jobs if job not in done):
        if target not in data:
            data[target] = make_data(target, args.work / target, args.steps, args.prompts)
        place = args.work / target / f"{list(ARMS).index(way)}-{seed}"
        print(target, way, seed, "...", flush=True)
        common = {"target": target, "seed": seed, "steps": args.steps, "data": str(data[target]), "folder": str(place)}
        trained = arms.run(train, {}, arm=asdict(ARMS[way]), **common)
        parallel = ARMS[way].kind == "peagle"
        al = {k: arms.run(measure, {}, target=target, head=trained["head"], num_k=k, parallel=parallel) for k in KS}
        found = {"target": target, "way": way, "seed": seed, "seconds": trained["seconds"], "al": al}
        report["rows"].append(json.loads(json.dumps(found)))
        arms.write_result(args.out, __doc__, report | provenance())
        print(*(f"K = {k}: {statistics.mean(lengths):.3f}" for k, lengths in al.items()), flush=True)
    print(arms.table(*published(report)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
