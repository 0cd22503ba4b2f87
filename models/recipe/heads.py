"""Train EAGLE-3 and P-EAGLE heads with the speculators library, on a target's own greedy answers.

The library's models and losses do the work; the loop around them is plain PyTorch because its trainer wants a GPU.
A head reads the residual entering target layers ``AUX_LAYERS``: vLLM's layer id n is ``hidden_states[n]``.
"""

import copy
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.models.peagle import PEagleDraftModel
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from target import make_optimizers, set_rate
from tokens import MASK_ID, VOCAB_SIZE
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

AUX_LAYERS = [2, 5, 7]
EXCHANGES_A_STEP = 4
LOSS = '{"kl_div": 0.5, "ce": 0.5}'
COUNTED_EXCHANGES = 24


@dataclass(frozen=True)
class HeadPlan:
    """What to train.

    Attributes:
        layers: decoder layers of the head.
        depth: tokens drafted ahead in training.
        muon_lr: peak learning rate of the matrices; AdamW's, of all else, is a tenth of it.
    """

    name: str
    kind: str  # "eagle3" or "peagle"
    target: str
    layers: int
    depth: int
    steps: int
    muon_lr: float = 0.01
    draft_vocab: int = VOCAB_SIZE
    begin_with: str | None = None  # a finished head of the same shape, in place of ``warm_start``


class TargetStates(torch.nn.Module):
    """A frozen target that yields, for tokens [1, T], aux states [1, T, 3H] and the last pre-norm states [1, T, H]."""

    def __init__(self, folder: Path):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        self.model.model.norm.register_forward_pre_hook(lambda _, inputs: setattr(self, "last", inputs[0]))

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.model.model(input_ids=ids, output_hidden_states=True).hidden_states
        return torch.cat([states[n] for n in AUX_LAYERS], dim=-1), self.last


def draft_vocabulary(exchanges: list, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(d2t [size] offsets, t2d [vocabulary] bool) of the ``size`` tokens the target says most."""
    counts = Counter(token for start, ids in exchanges for token in ids[start:].tolist())
    return build_vocab_mappings_from_distribution(counts, size, VOCAB_SIZE)


def new_head(plan: HeadPlan, target: Path, exchanges: list) -> Eagle3DraftModel:
    """An untrained head of the shape ``plan`` asks for, holding the target's embeddings and output matrix."""
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers = plan.layers
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: plan.layers]
    d2t, t2d = draft_vocabulary(exchanges, plan.draft_vocab)
    options = {
        "draft_vocab_size": plan.draft_vocab,
        "norm_before_residual": plan.kind == "eagle3",
        "target_layer_ids": AUX_LAYERS,
        "verifier_name_or_path": str(target),
        "draft_attn_impl": "sdpa",
    }
    if plan.kind == "peagle":
        return PEagleDraftModel.from_training_args(
            config, t2d, d2t, **options, mask_token_id=MASK_ID, num_depths=plan.depth
        )
    return Eagle3DraftModel.from_training_args(config, t2d, d2t, **options, ttt_steps=plan.depth)


@torch.no_grad()
def warm_start(head: Eagle3DraftModel, target: torch.nn.Module) -> None:
    """Begin as the end of the target: aux state, ``fc`` (identity), layer 0 (nearly a no-op), the target's last layers.

    With n layers of head over L of target, head layer i > 0 takes target layer L - n + i, so the aux state handed
    through is the one that enters target layer L - n + 1.
    """
    first = len(target.model.layers) - len(head.layers) + 1
    entry, hidden = AUX_LAYERS.index(min(first, AUX_LAYERS[-1])), head.hidden_size
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, entry * hidden : (entry + 1) * hidden] += torch.eye(hidden)
    head.layers[0].self_attn.o_proj.weight.mul_(0.1)
    head.layers[0].mlp.down_proj.weight.mul_(0.1)
    for layer, source in zip(head.layers[1:], target.model.layers[first:], strict=True):
        layer.load_state_dict(source.state_dict())
    head.norm.load_state_dict(target.model.norm.state_dict())


def continue_from(head: Eagle3DraftModel, folder: Path) -> None:
    """Take the weights of a finished head, save those that depend on the draft vocabulary."""
    weights = load_file(folder / "model.safetensors")
    fixed = {"d2t", "t2d", "lm_head.weight"}
    head.load_state_dict({name: value for name, value in weights.items() if name not in fixed}, strict=False)


def as_sample(states: TargetStates, start: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """One exchange as the library's batch of one row: token p+1 beside the hidden states of position p."""
    ids = ids.long()
    aux, last = states(ids.unsqueeze(0))
    sample = {
        "input_ids": ids,
        "hidden_states": aux[0],
        "verifier_last_hidden_states": last[0],
        "loss_mask": torch.arange(len(ids)) >= start,
        "lengths": torch.tensor([len(ids)]),
        "position_ids": torch.arange(len(ids)),
    }
    sample = {name: value.unsqueeze(0) for name, value in shift_batch(sample).items() if name != "lengths"}
    return {**sample, "document_ids": torch.zeros_like(sample["input_ids"])}


def loss_of(head: Eagle3DraftModel, plan: HeadPlan, sample: dict, loss_config: dict) -> tuple[torch.Tensor, dict]:
    """The library's loss and metrics for one exchange."""
    extra = {"num_depths": plan.depth} if plan.kind == "peagle" else {"ttt_steps": plan.depth}
    with torch.autocast("cpu", torch.bfloat16):
        _, loss, metrics = head(**sample, **extra, loss_config=loss_config)
    return loss, metrics


def budget(head: Eagle3DraftModel, plan: HeadPlan, states: TargetStates, exchanges: list) -> dict:
    """What training takes: parameters, exchanges, and operations an exchange, forward and backward, as torch counts."""
    loss_config = resolve_loss_config(LOSS, "eager")
    with FlopCounterMode(display=False) as counter:
        for sample in (as_sample(states, *exchange) for exchange in exchanges[:COUNTED_EXCHANGES]):
            loss_of(head, plan, sample, loss_config)[0].backward()
    head.zero_grad(set_to_none=True)
    return {
        "parameters": sum(weight.numel() for weight in head.parameters() if weight.requires_grad),
        "exchanges_seen": plan.steps * EXCHANGES_A_STEP,
        "mflop_an_exchange": round(counter.get_total_flops() / COUNTED_EXCHANGES / 1e6),
    }


def accuracy(metrics: list[dict], plan: HeadPlan) -> list[float]:
    """Share of right tokens per draft position over several exchanges."""
    key = "position_{}_acc" if plan.kind == "peagle" else "full_acc_{}"
    shares = []
    for d in range(plan.depth):
        right, total = (sum(float(m.get(key.format(d) + end, 0)) for m in metrics) for end in ("_sum", "_total"))
        shares.append(round(right / max(total, 1), 3))
    return shares


def train_head(plan: HeadPlan, target: Path, selfgen: Path, folder: Path, seed: int) -> dict:
    """Train one head and save it in bf16 and speculators format; returns the figures of the run."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    began, exchanges = time.time(), torch.load(selfgen)
    head, states = new_head(plan, target, exchanges).float(), TargetStates(target)
    if plan.begin_with:
        continue_from(head, folder.with_name(plan.begin_with))
    else:
        warm_start(head, states.model)
    spent = budget(head, plan, states, exchanges)
    optimizers = make_optimizers(head, muon_lr=plan.muon_lr, adam_lr=plan.muon_lr / 10)
    loss_config = resolve_loss_config(LOSS, "eager")
    order, recent = [], []
    progress = tqdm(total=plan.steps, desc=plan.name, unit="step", mininterval=5)
    for step in range(plan.steps):
        set_rate(optimizers, step, plan.steps)
        for _ in range(EXCHANGES_A_STEP):
            order = order or rng.sample(range(len(exchanges)), len(exchanges))
            loss, metrics = loss_of(head, plan, as_sample(states, *exchanges[order.pop()]), loss_config)
            (loss / EXCHANGES_A_STEP).backward()
            recent.append(metrics)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 25 == 24:
            recent = recent[-400:]
            progress.set_postfix(right=accuracy(recent, plan), refresh=False)
        progress.update()
    progress.close()
    save_head(head, target, folder)
    return {
        "kind": plan.kind,
        "layers": plan.layers,
        "trained_depth": plan.depth,
        "steps": plan.steps,
        **spent,
        "draft_vocab": plan.draft_vocab,
        "training_accuracy": accuracy(recent, plan),
        "seconds": round(time.time() - began),
        "seed": seed,
    }


def save_head(head: Eagle3DraftModel, target: Path, folder: Path) -> None:
    """Save in bf16; the config names the target by its place in the repository, not on this machine."""
    copy.deepcopy(head).to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # the library's own class, copied beside the weights
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("auto_map", None)
    config["speculators_config"]["verifier"]["name_or_path"] = f"models/{target.name}"
    path.write_text(json.dumps(config, indent=2) + "\n")
