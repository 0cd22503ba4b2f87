"""From how many tokens on drafts are looked up: ``prompt_lookup_min`` of the speculative config, vLLM's own field.

vLLM zeroes it where a head drafts, so that the draft model's config carries it, to every process.
"""

from typing import TYPE_CHECKING

from peagle_vllm.serving import RefusedError, warn_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FIELD = "prompt_lookup_min"
DEFAULT = 2  # tokens
MOST_MEMORY = 0.01  # of the device's: more is taken only for a look-up that the config asks for


def prompt_lookup_min(vllm_config: "VllmConfig") -> int:
    """How many last tokens must have occurred before for a draft to be what followed them; 0: it never is."""
    return getattr(vllm_config.speculative_config.draft_model_config.hf_config, FIELD, None) or 0


def settle_lookup(vllm_config: "VllmConfig") -> None:
    """Put the default where the config names no number, or 0 and a line in the log where look-up would do harm.

    RefusedError where the config asks for both, or for no number of tokens that can be looked up.
    """
    from peagle_kernels.lookup_drafts import MAX_MATCH

    spec = vllm_config.speculative_config
    hf_config = spec.draft_model_config.hf_config
    asked = getattr(hf_config, FIELD, None)
    if asked is not None and (type(asked) is not int or not 0 <= asked <= MAX_MATCH):
        what = f'"{FIELD}": {asked!r} in the speculative config is no number of tokens from 0 to {MAX_MATCH}'
        raise RefusedError(f"{what}; 0 turns look-up off, {DEFAULT} is the default")
    # vLLM's estimator judges a draft by the head's hidden state, which knows nothing of one that was looked up.
    adaptive = spec.enable_adaptive_verification
    if adaptive and asked:
        raise RefusedError(f'"{FIELD}": {asked} with enable_adaptive_verification; leave one of the two out')
    if asked is None:
        why_not = "adaptive verification judges the head's drafts only" if adaptive else _too_large(vllm_config)
        if spec.rejection_sample_method == "fly":  # vLLM 0.33's: it accepts a refused draft before a run of right ones
            why_not = "rejection_sample_method=fly would accept a wrong copy whose continuation is right"
        setattr(hf_config, FIELD, 0 if why_not else DEFAULT)
        if why_not:
            warn_once(f"P-EAGLE: no draft is looked up: {why_not}")


def _too_large(vllm_config: "VllmConfig") -> str | None:
    """Why the tokens of all requests do not stand on the device unasked; None if they do."""
    from vllm.platforms import current_platform

    requests, length = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
    num_bytes = requests * length * 4
    try:
        memory = current_platform.get_device_total_memory()
    except Exception:  # vLLM 0.32 has no number for a GPU that shares the host's memory, such as GB10's
        return None
    if num_bytes <= MOST_MEMORY * memory:
        return None
    size = f"max_num_seqs {requests} x max_model_len {length} x 4 bytes, {num_bytes >> 20} MiB"
    remedy = f'"{FIELD}": {DEFAULT} in the speculative config turns it on'
    return f"it would take {size}, more than {MOST_MEMORY:.0%} of the device's memory; {remedy}"
