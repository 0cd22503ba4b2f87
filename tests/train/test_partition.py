"""A step in parts is speculators' flat step, and the selector's: loss, metrics, and the gradient of every weight."""

import copy
import json
import re
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.models import peagle
from speculators.models.peagle.data import generate_cod_sample_indices
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, Qwen3Config

from peagle_tools.train import selector_training as module
from peagle_tools.train.draft_model import PEagleDraftModel
from peagle_tools.train.selector_training import new_selector
from tests.support.operations import Operations
from tests.train.runs import HIDDEN, SIZES, new_trainer, toy_run

VOCAB, DRAFT_VOCAB, NUM_AUX = 24, 20, 3
CONFIGS = {"llama": (LlamaConfig, 2), "qwen3": (Qwen3Config, 1)}  # class, KV heads of 4 query heads


@dataclass(frozen=True)
class Shape:
    """A head; ``norms`` are the norms before ``fc``."""

    family: str = "llama"
    norms: str = ""
    dtype: torch.dtype = torch.float32
    draft_vocab: int = DRAFT_VOCAB


def config_of(shape: Shape) -> peagle.PEagleSpeculatorConfig:
    config_class, kv_heads = CONFIGS[shape.family]
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": kv_heads, "head_dim": HIDDEN // 4, "vocab_size": VOCAB}
    layer = config_class(**SIZES, **sizes)
    layer._attn_implementation = "sdpa"
    return peagle.PEagleSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.draft_vocab,
        eagle_aux_hidden_state_layer_ids=list(range(NUM_AUX)),
        mask_token_id=1,
        **({shape.norms: True} if shape.norms else {}),
    )


def exact_norm(module: torch.nn.Module) -> None:
    """transformers' norms compute in float32; let this one compute in the dtype it is given."""
    module.forward = lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


@cache
def pair(shape: Shape) -> tuple[peagle.PEagleDraftModel, PEagleDraftModel]:
    """speculators' head, and ours with the same weights."""
    torch.manual_seed(7)
    flat = peagle.PEagleDraftModel(config_of(shape))
    for weight in flat.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    parts = PEagleDraftModel(copy.deepcopy(flat.config))
    parts.load_state_dict(flat.state_dict())
    for head in (flat, parts):
        head.to(shape.dtype).train().lm_head.weight.requires_grad_(shape.norms != "")
        if shape.dtype == torch.float64:
            for module in head.modules():
                if hasattr(module, "variance_epsilon"):
                    exact_norm(module)
    return flat, parts


def batch(documents: list[int], supervised: list[int], dtype: torch.dtype, padding: int = 0) -> dict[str, Tensor]:
    """One packed sequence of documents of these lengths, supervised at these positions."""
    ids = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    ids = torch.cat([ids, torch.full((padding,), -1)])
    loss_mask = torch.zeros(len(ids))
    loss_mask[supervised] = 1
    return {
        "hidden_states": torch.randn(1, len(ids), NUM_AUX * HIDDEN, dtype=dtype),
        "input_ids": torch.randint(VOCAB, (1, len(ids))),
        "document_ids": ids[None],
        "loss_mask": loss_mask[None],
        "verifier_last_hidden_states": torch.randn(1, len(ids), HIDDEN, dtype=dtype),
    }


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each row, in the dtype of the logits, where speculators' losses are in float32."""
    return -(targets.softmax(-1) * logits.log_softmax(-1)).sum(-1)


LOSS = {"ce": (cross_entropy, 1.0)}


def step(head: torch.nn.Module, batch: dict[str, Tensor], seed: int, **options: Any) -> tuple[dict, dict, dict]:
    """Loss, metrics and gradients by name of one step."""
    head.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss, metrics = head(**batch, **options)[1:]
    loss.backward()
    gradients = {name: weight.grad for name, weight in head.named_parameters() if weight.requires_grad}
    return {"loss": loss.detach()}, metrics, gradients


def furthest(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of a tensor relative to its own largest number; a tensor that is all zero must be zero."""
    assert actual.keys() == wanted.keys()
    errors = [0.0]
    for name, value in wanted.items():
        assert actual[name] is not None, f"{name} has no gradient"
        error, size = (actual[name] - value).abs().max(), value.abs().max()
        errors.append(float(error / size) if size else float(error))
    return max(errors)


LIMITS = {"fp32": (torch.float32, 1e-5), "fp64": (torch.float64, 1e-10)}
# Lengths of documents, supervised positions, padding.
SEQUENCES = {
    "single": ([23], range(3, 23), 0),
    "packed": ([9, 2, 12], [*range(2, 9), 10, *range(13, 17), *range(19, 23)], 0),
    "padded": ([11, 8], [*range(1, 11), *range(14, 19)], 5),
    "one-anchor": ([14], [8], 0),
    "no-anchor": ([7, 6], [], 2),
}
RATIOS = {"all": (1.0, 1.0), "cod": (0.7, 0.2)}
NORMS = ("", "fc_norm", "norm_before_fc")
GRID = product(SEQUENCES, (2, 4, 8), (1, 7, 999), RATIOS, LIMITS)
CASES = [
    (number, *case)
    for number, case in enumerate(GRID)
    if (case[2] == 7 or not case[0].endswith("-anchor")) and (case[1] == 8 or case[4] == "fp64")
]


@pytest.mark.parametrize(("seed", "sequence", "num_depths", "chunk_rows", "sampling", "dtype"), CASES)
def test_a_step_in_parts_is_the_flat_step(
    seed: int, sequence: str, num_depths: int, chunk_rows: int, sampling: str, dtype: str
) -> None:
    """Kinds of layers and norms take turns."""
    torch_dtype, limit = LIMITS[dtype]
    family = [*CONFIGS][seed // 4 % 2]
    documents, *positions = SEQUENCES[sequence]
    flat, parts = pair(Shape(family, NORMS[seed % len(NORMS)], torch_dtype))
    torch.manual_seed(seed)
    given = batch(documents, [*positions[0]], torch_dtype, positions[1])
    ratio, least = RATIOS[sampling]
    options = {"num_depths": num_depths, "down_sample_ratio": ratio, "down_sample_ratio_min": least}
    options["loss_config"] = LOSS
    wanted = step(flat, given, seed, **options)
    actual = step(parts, given, seed, chunk_rows=chunk_rows, **options)
    for part, flat_part in zip(actual, wanted, strict=True):
        assert furthest(part, flat_part) < limit


def test_loss_and_metrics_are_the_librarys() -> None:
    """Of its own losses, with and without gradients, with fewer anchors than there are."""
    flat, parts = pair(Shape("qwen3"))
    given = batch([40], [*range(4, 40)], torch.float32)
    losses = resolve_loss_config('{"kl_div": 0.5, "ce": 0.5}', "eager")
    options = {"num_depths": 5, "max_anchors": 20, "loss_config": losses}
    wanted, actual = step(flat, given, 3, **options), step(parts, given, 3, chunk_rows=16, **options)
    with torch.no_grad():
        torch.manual_seed(3)
        loss, metrics = parts(**given, **options, chunk_rows=16)[1:]
    for part, wanted_part in zip((*actual, {"loss": loss}, metrics), (*wanted, *wanted[:2]), strict=True):
        assert furthest(part, wanted_part) < 1e-5


def largest(tokens: int, num_depths: int) -> int:
    """The most numbers in a tensor that an operation returns."""
    given, sizes = batch([tokens], [*range(1, tokens)], torch.float32), set[int]()

    def note(_: Any, values: Any) -> None:
        sizes.update(leaf.numel() for leaf in tree_leaves(values[2]) if isinstance(leaf, torch.Tensor))

    with Operations(note, on=True):
        step(pair(Shape())[1], given, 0, num_depths=num_depths, chunk_rows=64, loss_config=LOSS)
    return max(sizes)


def test_no_tensor_grows_with_depths_or_with_the_square_of_tokens() -> None:
    assert largest(512, 8) < 1.1 * largest(512, 3)  # a chunk ends with its last anchor
    assert largest(1024, 3) < 2.1 * largest(512, 3)


def test_documents_of_like_sizes_attend_at_once() -> None:
    """Else launches bound a step on a GPU."""
    counts, all_rows = [], {"down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    for documents in ([8, 7], [8, 7] * 10):
        given = batch(documents, [i for i in range(sum(documents)) if i % 15 not in (0, 8)], torch.float32)
        with Operations(lambda op, _: re.match("aten::_scaled_dot_product(?!.*backward)", op.name()), on=True) as seen:
            step(pair(Shape())[1], given, 0, num_depths=4, chunk_rows=999, loss_config=LOSS, **all_rows)
        counts.append(seen.calls.total())
    assert counts[0] == counts[1] > 0


def test_checkpoints_are_the_librarys(tmp_path: Path) -> None:
    heads = pair(Shape())
    for name, head in zip(("flat", "parts"), heads, strict=True):
        head.save_pretrained(tmp_path / name)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "flat" / file).read_bytes()
    assert json.loads((tmp_path / "parts/config.json").read_text())["architectures"] == ["PEagleDraftModel"]


RANK, CANDIDATES = 4, 8


def whole_step(
    flat: torch.nn.Module, selector: Any, draft_ids: list[int], given: dict[str, Tensor], options: dict[str, Any]
) -> tuple[dict, dict, dict]:
    """Losses and gradients of a step as the formula says: speculators' flat step, and the rows one by one."""
    seen: dict[str, Tensor] = {}
    hook = flat.lm_head.register_forward_hook(lambda _, ins, out: seen.update(hidden=ins[0][0], logits=out[0]))
    torch.manual_seed(0)
    loss = flat(**given, **options)[1]
    hook.remove()
    torch.manual_seed(0)
    ids, documents = given["input_ids"][0].tolist(), given["document_ids"][0].tolist()
    ratios = (options[name] for name in ("num_depths", "down_sample_ratio", "down_sample_ratio_min"))
    anchor, depth = generate_cod_sample_indices(len(ids), given["loss_mask"], *ratios)
    losses = []
    for row, at in enumerate((anchor + depth).tolist()):
        has_next = documents[at : at + 2] == [documents[at]] * 2
        if not (given["loss_mask"][0, at] and has_next and ids[at + 1] in draft_ids):
            continue
        truth, logits = draft_ids.index(ids[at + 1]), seen["logits"][row]
        candidates = logits.topk(CANDIDATES).indices.tolist()
        candidates = candidates if truth in candidates else [*candidates[:-1], truth]
        context = selector.predecessor_codebook[ids[at]] * (selector.hidden_projection.weight @ seen["hidden"][row])
        scores = logits[candidates] + selector.successor_codebook[candidates] @ context
        losses.append(-scores.log_softmax(0)[candidates.index(truth)])
    selector_loss = torch.stack(losses).mean()
    (loss + selector_loss).backward()
    gradients = {name: weight.grad for name, weight in flat.named_parameters() if weight.requires_grad}
    gradients |= {f"candidate_selector.{name}": weight.grad for name, weight in selector.named_parameters()}
    return {"loss": (loss + selector_loss).detach()}, {"selector_loss_sum": selector_loss.detach()}, gradients


@pytest.mark.parametrize(
    ("chunk_rows", "draft_vocab", "ratio"), [*product((1, 7, 999), (DRAFT_VOCAB, VOCAB), ((1.0, 1.0), (0.7, 0.2)))]
)
def test_a_step_in_parts_is_the_whole_formula(
    chunk_rows: int, draft_vocab: int, ratio: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and the gradient of every weight, in float64, of two documents and padding."""
    monkeypatch.setattr(module, "NUM_CANDIDATES", CANDIDATES)
    flat, parts = pair.__wrapped__(Shape(norms="fc_norm", dtype=torch.float64, draft_vocab=draft_vocab))
    draft_ids = [token for token in range(VOCAB) if draft_vocab == VOCAB or token % 6]
    if parts.t2d is not None:
        parts.t2d[draft_ids] = True
    selectors = []
    for _ in range(2):
        torch.manual_seed(5)
        selectors.append(new_selector(parts, RANK, None).double())
        torch.nn.init.normal_(selectors[-1].predecessor_codebook)
    parts.candidate_selector = selectors[1]
    torch.manual_seed(6)
    supervised = [*range(2, 9), *range(13, 17), *range(19, 23)]
    given = batch([9, 2, 12], supervised, torch.float64, padding=3)
    options = {"num_depths": 4, "down_sample_ratio": ratio[0], "down_sample_ratio_min": ratio[1]}
    options["loss_config"] = LOSS
    wanted = whole_step(flat, selectors[0], draft_ids, given, options)
    actual = step(parts, given, 0, **options, chunk_rows=chunk_rows)
    assert furthest(actual[0], wanted[0]) < 1e-10 and furthest(actual[2], wanted[2]) < 1e-10
    name = "selector_loss_sum"
    assert float(actual[1][name]) == pytest.approx(float(wanted[1][name]), rel=1e-12)


def test_a_step_without_a_token_to_choose_has_no_selector_loss() -> None:
    """Its head learns; the selector's gradients are zero, and there: other processes wait for them."""
    _, parts = pair.__wrapped__(Shape())
    parts.candidate_selector = new_selector(parts, RANK, None)  # no token can be drafted
    given = batch([12], [*range(3, 12)], torch.float32)
    metrics, gradients = step(parts, given, 0, num_depths=3, loss_config=LOSS)[1:]
    assert metrics["selector_loss_sum"] == 0 and gradients["fc.weight"].any()
    assert not any(gradients[f"candidate_selector.{name}"].any() for name in parts.candidate_selector.state_dict())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_new_selector_has_its_own_rate_and_no_weight_decay(tmp_path: Path, name: str) -> None:
    trainer = new_trainer(toy_run(tmp_path / "run", selector={"rank": RANK}, optimizer={"name": name}))
    selector = trainer.head.candidate_selector  # whose successors are not 0: else neither would ever get a gradient
    assert selector.successor_codebook.all() and not selector.predecessor_codebook.any()  # no draft is changed yet
    wanted = {f"candidate_selector.{part}" for part in selector.state_dict()}
    *others, group = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    assert isinstance(trainer.optimizers[-1], torch.optim.AdamW)
    assert set(group["param_names"]) == wanted and group["weight_decay"] == 0 and group["initial_lr"] == 0.003
    assert all(group["weight_decay"] > 0 and group["initial_lr"] != 0.003 for group in others)
    without = new_trainer(toy_run(tmp_path / "without", optimizer={"name": name}))
    assert len(without.optimizers[-1].param_groups) == 1
