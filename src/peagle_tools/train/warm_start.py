"""What a head begins as, where ``head.init`` says so: the end of its target, or another head of the same target."""

from argparse import Namespace
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.models import utils
from speculators.train import cli
from speculators.utils.loading import load_model_layers

from peagle_tools.shared.errors import ToolError
from peagle_tools.train.draft_model import PEagleDraftModel
from peagle_tools.train.peagle_yaml import Config
from peagle_vllm.heads.checks import check
from peagle_vllm.heads.config import default_aux_layers
from peagle_vllm.heads.files import download, find, one_line
from peagle_vllm.heads.head import Head, read_head
from peagle_vllm.heads.target import read_target

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# An EAGLE-3 head takes the last two from its target.
NOT_IN_A_HEAD = ("verifier_", "mask_hidden", "lm_head.", "embed_tokens.")
SMALL = 0.1  # of what is left next to the identity where the head begins as the target's last layers


def check_init(config: Config) -> Head:
    """The head that ``head.init`` names; its weights are not read.

    ToolError or HeadError where it cannot be read, or become the one of peagle.yaml.
    """
    init, layers = str(config.head.init), config.head.layers
    head = read_head(find(init))
    aux_layers = head.aux_layer_ids or default_aux_layers(read_target(config.target).num_layers)
    if head.kind == "target" or not head.is_speculators:
        remedy = "`peagle-vllm convert --to speculators` writes a P-EAGLE head so"
        raise ToolError(f"head.init: {init} is no head as speculators writes it; {remedy}")
    problems = check(head, read_target(config.target)) if head.kind == "peagle" else []
    if faults := [problem.line for problem in problems if problem.severity == "error"]:
        raise ToolError(f"head.init: {faults[0]}")
    for key, ours, theirs in (
        ("layers", min(layers, head.num_layers), head.num_layers),
        ("aux_layers", config.aux_layers, [*aux_layers]),
        ("draft_vocab", config.head.draft_vocab or head.draft_vocab_size, head.draft_vocab_size),
    ):
        if ours != theirs:
            raise ToolError(f"head.{key}: is {ours}, but the head of head.init ({init}) has {theirs}; write {theirs}")
    return head


def begun_from(config: Config, args: Namespace) -> PEagleDraftModel:
    """The head of ``args`` with layers, norms, vocabulary and weights of the head that ``head.init`` names.

    Layers beyond that head's begin as the identity, so that it drafts the same. Raises what ``check_init`` does.
    """
    init, layers = str(config.head.init), config.head.layers
    folder = download(init)
    head = check_init(config)
    weights = {name: tensor for file in head.weight_files for name, tensor in load_file(folder / file).items()}
    options = vars(args) | {name: head.config.get(name, False) for name in NORMS}
    options["draft_vocab_size"] = head.draft_vocab_size
    if head.kind == "peagle":
        options["mask_token_id"] = head.mask_token_id
    try:
        layer = cli.load_draft_transformer_layer_config(init, config.target)
        kinds = getattr(layer, "layer_types", None) or ["full_attention"] * head.num_layers
        layer.num_hidden_layers = layers
        layer.layer_types = kinds + ["full_attention"] * (layers - head.num_layers)
        model = PEagleDraftModel.from_training_args(layer, weights.get("t2d"), weights.get("d2t"), **options)
        missing, unknown = model.load_state_dict(weights, strict=False)
    except (ValueError, RuntimeError) as error:  # speculators', torch's
        raise ToolError(f"head.init: {init} does not fit ({one_line(error, 300)}); leave init out") from None
    new_layers = range(head.num_layers, layers)
    new = (*(f"layers.{number}." for number in new_layers), *NOT_IN_A_HEAD)
    if wrong := [*unknown, *(name for name in missing if not name.startswith(new))]:
        raise ToolError(f"head.init: {init}: {wrong[0]} is in one of the two heads only")
    for number in new_layers:
        _scale_output(model.layers[number], 0)
    return model


def draft_vocabulary(config: Config, args: Namespace) -> dict[str, Any]:
    """d2t [draft_vocab], t2d [vocabulary], draft_vocab_size: the tokens that the target says most, or all of them."""
    if not config.head.draft_vocab:
        return {"d2t": None, "t2d": None, "draft_vocab_size": read_target(config.target).vocab_size}
    counts = config.data_folder / "token_freq.pt"
    if not counts.exists():
        raise ToolError(f"head.draft_vocab: {counts} is not there; `peagle-vllm train pipeline` counts tokens")
    return dict(zip(("d2t", "t2d", "draft_vocab_size"), cli.parse_vocab_mappings(args), strict=True))


@torch.no_grad()
def begin_as_target(head: PEagleDraftModel, target: str) -> None:
    """Give ``head`` the last layers of ``target``.

    With n layers of head over L of the target, head layer i > 0 takes target layer L - n + i. ``fc`` hands through the
    aux state that enters target layer L - n + 1, or the nearest one before it; layer 0 changes it little. ToolError
    where its layers are not of the head's kind or size.
    """
    first, hidden = read_target(target).num_layers - len(head.layers) + 1, head.hidden_size
    before = [number for number in head.target_layer_ids if number <= first]
    start = hidden * head.target_layer_ids.index(max(before, default=min(head.target_layer_ids)))
    head.fc.weight.mul_(SMALL)
    head.fc.weight[:, start : start + hidden] += torch.eye(hidden)
    _scale_output(head.layers[0], SMALL)
    modules = {"model.norm": head.norm} | {f"layers.{first + i}": layer for i, layer in enumerate(head.layers[1:])}
    names = [f"{name}.{weight}" for name, module in modules.items() for weight in module.state_dict()]
    weights = load_model_layers(names, target)
    if utils.uses_gemma_style_final_norm(head.config):  # its norms scale by 1 + w
        weights |= {name: weight + 1 for name, weight in weights.items() if name.endswith("norm.weight")}
    for name, module in modules.items():
        try:
            module.load_state_dict({weight: weights[f"{name}.{weight}"] for weight in module.state_dict()})
        except (KeyError, RuntimeError) as error:
            reason = str(error).splitlines()[-1].strip()
            what = f"its layers are not like the head's ({reason})"
            raise ToolError(f"head.init: target: {what}; leave init out") from None


@torch.no_grad()
def _scale_output(layer: Any, factor: float) -> None:
    """What ``layer`` adds to its input, times ``factor``."""
    layer.self_attn.o_proj.weight.mul_(factor)
    layer.mlp.down_proj.weight.mul_(factor)
