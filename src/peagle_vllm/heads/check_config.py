"""What is wrong with the class or the mask token of a head's config; ``fields.field_faults`` has the layers' fields."""

from collections.abc import Iterator

from peagle_vllm.heads.config import LLAMA_ARCHITECTURES, QWEN3_ARCHITECTURES, is_whole
from peagle_vllm.heads.files import shown
from peagle_vllm.heads.head import Head


def check_architecture(head: Head) -> Iterator[str]:
    if head.family is None and head.is_speculators:
        kind, nested = head.config.get("speculators_model_type"), head.served.get("model_type", "llama")
        what = f"speculators_model_type {shown(kind)} with model_type {shown(nested)} is no P-EAGLE class of vLLM"
        yield f'{what}, needs "peagle" with "llama" or "qwen3": {head.config_file}; name a P-EAGLE head'
    elif head.family is None:
        what = f"architecture {shown(head.architecture)} is no P-EAGLE class of vLLM: {head.config_file}"
        yield f'{what}; set "architectures" to one of {", ".join(sorted(LLAMA_ARCHITECTURES | QWEN3_ARCHITECTURES))}'
    eagle = head.served.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        yield f"eagle_config.use_aux_hidden_state is off, P-EAGLE needs it: {head.config_file}; set it to true"


def check_mask_token(head: Head) -> Iterator[str]:
    token, key, file = head.mask_token_id, head.mask_token_key, head.config_file
    remedy = "set it to the id the head was trained with"
    if token is None:
        also = ' next to "speculators_model_type": "peagle"' if head.is_speculators else ""
        what = f"no mask token id ({key} is null)" if key else "no mask token id"
        add = f'add "mask_token_id" with the id that the head was trained with{also}'
        yield f"{what}: {file}; {add}, or give it to peagle-vllm convert --mask-token-id"
    elif not is_whole(token):
        yield f"{key} is {shown(token)}, needs a whole number: {file}; {remedy}"
    elif not 0 <= token < head.vocab_size:
        yield f"{key} is {shown(token)}, outside the vocabulary of {head.vocab_size} tokens: {file}; {remedy}"
