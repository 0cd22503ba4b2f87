"""Every check of a head, in one walk: alone (``check_head``), for a target (``check_pair``), for a tool (``check``).

No weight is loaded for them; ``serving.check_loaded_head`` checks what only the loaded head shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from peagle_vllm.heads import check_weights as weights
from peagle_vllm.heads.config import AUX_KEY, default_aux_layers, is_whole
from peagle_vllm.heads.fields import field_faults
from peagle_vllm.heads.files import HeadError, as_line, shown
from peagle_vllm.heads.head import AGAIN, NO_HEAD, Head
from peagle_vllm.heads.selector import selector_faults
from peagle_vllm.heads.target import Target, Token, read_tokens
from peagle_vllm.heads.vocabulary import prefix_fault

THIS_TARGET = "use the head that was trained for this target"
SAVE_AS = "pickled weights are never read; save them as *.safetensors"


@dataclass(frozen=True)
class Problem:
    """One line for the user: what is wrong, where, how to correct it. A warning does not stop serving."""

    line: str
    severity: Literal["error", "warning"] = "error"

    def __post_init__(self) -> None:
        object.__setattr__(self, "line", as_line(self.line))


def check(head: Head, target: Target | None = None, token: Token | None = None) -> list[Problem]:
    """Problems of a head for a tool, which needs its weights, and reads them all; a dummy load in vLLM does not."""
    problems = check_head(head) if target is None else check_pair(head, target)
    if not head.tensors and not _is_pickled(head):
        problems.append(Problem(f"no *.safetensors: {head.name}; {SAVE_AS}"))
    if head.kind == "peagle":
        problems += [Problem(line) for line in weights.check_finite(head)]
    if token is not None and token.kind in ("in use", "ordinary"):
        what = f"the mask token {token.id} is {token.text!r}, which the target's own text uses: {head.config_file}"
        right = "right only if the head was trained with this mask token: check its training config"
        problems.append(Problem(f"{what}; {right}", "warning"))
    return problems


def check_head(head: Head) -> list[Problem]:
    """Problems of a head by itself; the most telling first, empty for a sound one."""
    if head.kind == "target":
        return [Problem(f"{head.name} {NO_HEAD}")]
    if head.kind == "eagle3":
        what = f"{head.name} is no P-EAGLE head (an EAGLE-3 head, perhaps): no mask_hidden and no mask token id"
        remedy = 'remove "parallel_drafting": true from the speculative config, or name a P-EAGLE head'
        return [Problem(f"{what}; {remedy}")]
    fields = list(field_faults(head))
    lines = [*_architecture(head), *_mask_token(head), *fields]
    if _is_pickled(head):  # vLLM would unpickle them
        lines.append(f"no *.safetensors: {head.name}; {SAVE_AS}")
    if head.tensors:
        layers = list(weights.check_layers(head))
        lines += layers
        of_modules = weights.check_fc, weights.check_mask_hidden, weights.check_norms, weights.check_vocabulary
        try:
            for part in (*of_modules, selector_faults):
                lines += part(head)
        except HeadError as error:
            lines.append(str(error))
        if head.family and not head.is_quantized and not fields and not layers:  # else shapes cannot be known
            lines += weights.check_shapes(head)
    return [Problem(line) for line in lines]


def _architecture(head: Head) -> Iterator[str]:
    if head.family is None:
        remedy = "name a P-EAGLE head, or correct it"
        if head.is_speculators:
            kind, nested = head.config.get("speculators_model_type"), head.served.get("model_type", "llama")
            what = f"speculators_model_type {shown(kind)} with model_type {shown(nested)}"
        else:
            what = f"architecture {shown(head.config['architectures'][0])}"
            remedy += ": LlamaForCausalLMEagle3, or Eagle3Qwen3ForCausalLM if its layers have q_norm"
        yield f"{what} is no P-EAGLE class of vLLM: {head.config_file}; {remedy}"
    eagle = head.served.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        yield f"eagle_config.use_aux_hidden_state is off, P-EAGLE needs it: {head.config_file}; set it to true"


def _mask_token(head: Head) -> Iterator[str]:
    token, key = head.mask_token_id, head.mask_token_key
    remedy = f"{head.config_file}; set it to the id the head was trained with"
    if token is None:
        what = f"no mask token id{f' ({key} is null)' if key else ''}: {head.config_file}"
        yield f"{what}; add the one that the head was trained with, or give it to peagle-vllm convert --mask-token-id"
    elif not is_whole(token):
        yield f"{key} is {shown(token)}, needs a whole number: {remedy}"
    elif not 0 <= token < head.vocab_size:
        yield f"{key} is {shown(token)}, outside the vocabulary of {head.vocab_size} tokens: {remedy}"


def _is_pickled(head: Head) -> bool:
    if head.tensors or head.folder is None:
        return False
    return any(path.suffix in (".bin", ".pt", ".pth") for path in head.folder.iterdir())


def check_pair(head: Head, target: Target, *, num_speculative_tokens: int | None = None) -> list[Problem]:
    """What is wrong with serving ``head`` for ``target``; empty if nothing."""
    problems: list[Problem] = []
    depth, num_k = head.trained_depth, num_speculative_tokens
    if head.kind == "peagle":
        if depth and num_k and num_k > depth:
            what = f"num_speculative_tokens is {num_k}, and {head.name} was trained {depth} deep"
            remedy = f"drafts beyond that are rarely accepted; set it to {depth} or less"
            problems.append(Problem(f"{what}: {remedy}", "warning"))
        problems += [*_sizes(head, target), *_vocabulary(head, target), *_aux_layers(head, target)]
    return problems + check_head(head)


def _sizes(head: Head, target: Target) -> Iterator[Problem]:
    if head.target_hidden_size != target.hidden_size:
        key = "target_hidden_size" if head.served.get("target_hidden_size") else "hidden_size"
        what = f"{key} is {head.target_hidden_size}, {target.name} has hidden states {target.hidden_size} wide"
        yield Problem(f"{what}: {head.config_file}; {THIS_TARGET}")
    for module in ("embed_tokens", "lm_head") if head.tensors and head.hidden_size != target.hidden_size else ():
        if not head.has(module):
            what = f"{module} is missing, and that of {target.name} is {target.hidden_size} wide"
            yield Problem(f"{what} where the head's is {head.hidden_size}: {head.file_of(module)}; {AGAIN}")
    if head.tensors and head.config.get("embed_requires_grad") is True and not head.has("embed_tokens"):
        what = "embed_tokens is missing, and embed_requires_grad says that they were trained"
        yield Problem(f"{what}: {head.file_of('embed_tokens')}; drafts are poor with the target's: {AGAIN}", "warning")


def _vocabulary(head: Head, target: Target) -> Iterator[Problem]:
    """Are the head's tokens the target's, or the first of them?"""
    if head.vocab_size == target.vocab_size:
        return
    what = f"vocab_size is {head.vocab_size}, {target.name} has {target.vocab_size}"
    if head.vocab_size > target.vocab_size:
        yield Problem(f"{what}: {head.config_file}; {THIS_TARGET}")
    elif not (tokens := read_tokens(target.tokenizer or target.name)):
        unknown = "no tokenizer.json shows whether those beyond were added to the head's"
        yield Problem(f"{what}, and {unknown}: {head.config_file}; drafts are poor if they were not", "warning")
    elif fault := prefix_fault(head, target, tokens):
        yield Problem(f"{what}, and {fault}: {head.config_file}; {THIS_TARGET}")


def _aux_layers(head: Head, target: Target) -> Iterator[Problem]:
    """Do the layers that the head names, or vLLM's default, exist in the target, and does ``fc`` take as many?"""
    default, needed = list(default_aux_layers(target.num_layers)), head.aux_needed
    ids, source = default, f"no aux layers are named, and vLLM's default {default}"
    elsewhere = {key: v for key, v in {**head.config, **head.served}.items() if key.endswith("layer_ids") and v}
    if head.aux_layer_ids is None and (key := next(iter(elsewhere), None)):
        what = f'{key} is {shown(elsewhere[key])}, which vLLM does not read: {head.config_file}; name it "{AUX_KEY}"'
        yield Problem(f"{what} if they are the aux layers that the head was trained on", "warning")
    if head.aux_layer_ids is not None:
        ids, source = list(head.aux_layer_ids), f"{head.aux_key} is {shown(head.aux_layer_ids)} and"
    end = f'{head.config_file}; set "{AUX_KEY}" to the {needed} layers that the head was trained on'
    if twice := [i for i in ids if ids.count(i) > 1]:
        yield Problem(f"{source} names layer {twice[0]} twice, vLLM captures it once: {end}")
    if outside := [i for i in ids if not 0 <= i <= target.num_layers]:
        yield Problem(f"{source} names layer {shown(outside[0])}, {target.name} has {target.num_layers} layers: {end}")
    if len(ids) != needed:
        yield Problem(f"{source} names {len(ids)} layers, fc takes {needed} aux hidden states: {end}")
    if ids == [i - 1 for i in default]:
        what = f"{head.aux_key} is {shown(ids)}, one less than vLLM's default {default}: {head.config_file}"
        yield Problem(f"{what}; add one to each if the head was trained so (peagle-vllm diagnose tries it)", "warning")
    if head.aux_layer_ids is not None and ids != sorted(ids):
        what = f"{head.aux_key} is {shown(ids)}, vLLM hands them to the head in ascending order: {head.config_file}"
        yield Problem(f"{what}; drafts are poor if the head was trained on the order named", "warning")
