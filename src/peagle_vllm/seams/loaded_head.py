"""What the drafters of both runners read of a loaded head: part of the seams speculator and proposer."""

from peagle_vllm.seams.ledger import Touch, touches

HEAD_CLASSES = {
    "vllm.model_executor.models.llama_eagle3": "Eagle3LlamaForCausalLM",
    "vllm.model_executor.models.qwen3_eagle3": "Eagle3Qwen3ForCausalLM",
}
_LOGITS = "vllm.model_executor.layers.logits_processor"

LOADED_HEAD: tuple[Touch, ...] = (
    # The buffer mask_hidden, lm_head and draft_id_to_target_id are made in __init__.
    *(
        touch
        for module, name in HEAD_CLASSES.items()
        for touch in (
            *touches(module, "called", "__init__", "load_weights", "combine_hidden_states", "compute_logits", of=name),
            *touches(module, "called", "forward", of=name, what="signature"),
        )
    ),
    # Greedy drafts (greedy.py) take the place of compute_logits.
    *touches(
        _LOGITS,
        "called",
        "forward",
        "_get_logits",
        "_apply_head",
        "get_top_tokens",
        "head_dtype",
        "scale",
        of="LogitsProcessor",
    ),
    *touches("vllm.model_executor.layers.vocab_parallel_embedding", "called", "tp_size", of="VocabParallelEmbedding"),
)
