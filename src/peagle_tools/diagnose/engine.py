"""Measuring setups in vLLM: one engine for all of them, whose loaded head is changed in place.

Prompts run greedily, so the target's text stays the same. Acceptance comes from vLLM's own counters; the rounds that
each answer took show how sure a difference is.
"""

from functools import partial
from typing import Any

from peagle_tools.diagnose.interventions import Setup
from peagle_tools.diagnose.search import Measured
from peagle_tools.shared.acceptance import BY_REQUEST, Answer, by_repeated, read_engine
from peagle_tools.shared.engines import KV_CACHE_BYTES, generate
from peagle_vllm.observer import drafter_of

# Of ``vllm.LLM``: room for these prompts, whatever else runs on the machine. By default vLLM takes nearly all of it.
ARGUMENTS = {
    "kv_cache_memory_bytes": KV_CACHE_BYTES,
    "gpu_memory_utilization": 0.05,
    "per_request_spec_decode_metrics": BY_REQUEST[1],
}


def measure(llm: Any, prompts: list[list[int]], max_tokens: int, setup: Setup) -> Measured:
    """Run a setup of the pair that ``llm`` has loaded, on prompts of token ids."""
    llm.collective_rpc(partial(apply, setup=setup))  # vLLM serialises a dataclass of ``args`` to a dict
    before = read_engine(llm)
    answers, lengths = [], []
    for output in generate(llm, prompts, max_tokens):
        completion = output.outputs[0]
        metrics = completion.spec_decode_metrics.to_dict()
        answers.append(Answer(output.prompt_token_ids, completion.token_ids, metrics))
        # The prompt's own round gives one token.
        lengths.append((len(completion.token_ids) - 1) / max(1, metrics["num_spec_steps"]))
    return Measured(read_engine(llm).since(before), tuple(lengths), by_repeated(answers))


def apply(worker: Any, setup: Setup) -> None:
    """Make the loaded pair of this worker run as ``setup`` says; what it leaves open, as it was loaded.

    The aux layers and the mask token are asked for as vLLM's runners do. Where layers norm their residual, and their
    rotary embedding, is part of the loaded modules, which this engine alone uses.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    runner, drafter = worker.model_runner, drafter_of(worker)
    runner.model.set_aux_hidden_state_layers(setup.aux_layers)
    if drafter is None:  # another pipeline stage drafts
        return
    drafter.parallel_drafting_token_id = setup.mask_token_id
    layers = drafter.model.model.layers
    first = layers[0]
    first._residual_norm = first._norm_before_residual if setup.norm_before_residual else first._norm_after_residual
    if not hasattr(drafter, "rope_as_loaded"):
        drafter.rope_as_loaded = first.self_attn.rotary_emb
    rope = loaded = drafter.rope_as_loaded
    if setup.rope is not None:
        config = runner.vllm_config.speculative_config.draft_model_config.hf_config
        with set_current_vllm_config(runner.vllm_config):
            rope = get_rope(loaded.head_size, config.max_position_embeddings, loaded.is_neox_style, dict(setup.rope))
        rope = rope.to(loaded.cos_sin_cache.device)
    for layer in layers:
        layer.self_attn.rotary_emb = rope
