"""What drafting on Model Runner V2 takes of a GPU's memory, from a configuration alone."""

from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from peagle_vllm.sampling.greedy import MAX_LOGITS_BYTES
from peagle_vllm.sampling.selector import selector_config_of
from peagle_vllm.serving import kv_bytes_per_token
from peagle_vllm.v2.cudagraph import draft_graphs


def draft_memory(vllm_config: VllmConfig) -> dict[str, int]:
    """The memory that ``ParallelEagleSpeculator`` will take, for a head in one KV cache group. Sizes in bytes.

    Returns:
        head_weights_bytes: of the head's fc, layers and lm_head as its config has them, in one process. An lm_head that
            it shares with the target takes nothing; embeddings of its own come on top.
        head_kv_bytes_per_token: of the head's layers in the KV cache, in one process; the tokens that the cache holds
            are fewer.
        full_graphs, full_graph_requests, piecewise_graphs, piecewise_rows: graphs captured, and what each kind serves
            at most. What the graphs themselves take only a GPU can tell; vLLM's log does.
        buffers_bytes: what stays allocated beside the head, vLLM's small buffers apart: captured hidden states of the
            largest FULL graph, the drafter's input rows of the largest graph; ids, positions, slots, row map and
            samples of the largest batch there can be; scores of a sharpened head's candidates, and which of them
            ``draft_logits`` holds; probabilistic drafts' logits.
        largest_step_bytes: what a batch of max_num_batched_tokens rows takes for its own step; vLLM's profiling run
            counts it, so it comes off the KV cache, not on top.
    """
    spec, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    max_k, max_num_seqs = vllm_config.num_speculative_tokens, scheduler.max_num_seqs
    max_num_tokens = scheduler.max_num_batched_tokens
    graphs = draft_graphs(vllm_config, vllm_config.compilation_config.cudagraph_mode)
    size = vllm_config.model_config.dtype.itemsize
    hidden = spec.draft_model_config.get_hidden_size() * size
    aux = _num_aux(vllm_config) * vllm_config.model_config.get_hidden_size() * size
    per_row = 4 + 8 + 4 + 8  # input id, position, row map, slots
    per_sample = 8 + 8 + 8  # row, position, request
    samples = min(max_num_seqs * max_k, max_num_tokens)
    selector_config = selector_config_of(vllm_config)
    top_k, rank = (selector_config.selector_top_k, selector_config.selector_rank) if selector_config else (0, 0)
    per_candidate = 4 + 8  # score, token id
    logits = min(samples * _draft_vocab_size(vllm_config) * size, MAX_LOGITS_BYTES)
    buffers = (1 + graphs.max_num_reqs * (max_k + 1)) * aux + graphs.max_rows * hidden + max_num_tokens * per_row
    buffers += max_num_seqs * max_k * (per_sample + top_k * per_candidate)
    if spec.draft_sample_method == "probabilistic":  # ``draft_logits``, in float32 with a selector
        draft = spec.draft_model_config
        buffers += max_num_seqs * max_k * draft.get_vocab_size() * (4 if selector_config else draft.dtype.itemsize)
    return {
        "head_weights_bytes": _weights(vllm_config),
        "head_kv_bytes_per_token": kv_bytes_per_token(
            spec.draft_model_config, spec.draft_parallel_config, vllm_config.cache_config.cache_dtype
        ),
        "full_graphs": len(graphs.decode),
        "full_graph_requests": graphs.max_num_reqs,
        "piecewise_graphs": len(graphs.mixed),
        "piecewise_rows": max(graphs.mixed, default=0),
        "buffers_bytes": buffers,
        # Staging, before and after fc; input rows; logits; candidates and gates.
        "largest_step_bytes": max_num_tokens * (aux + 2 * hidden)
        + logits
        + samples * (top_k * per_candidate + rank * size),
    }


def _weights(vllm_config: VllmConfig) -> int:
    spec = vllm_config.speculative_config
    draft = spec.draft_model_config
    hidden, layers = draft.get_hidden_size(), draft.get_total_num_hidden_layers()
    heads, kv_heads = draft.model_arch_config.total_num_attention_heads, draft.get_total_num_kv_heads()
    fc = _num_aux(vllm_config) * vllm_config.model_config.get_hidden_size()
    qkv = (layers + 1) * (heads + 2 * kv_heads) * draft.get_head_size()  # the first layer's are twice as wide
    rest = layers * (heads * draft.get_head_size() + 3 * draft.hf_config.intermediate_size)
    elements = hidden * (fc + qkv + rest + _draft_vocab_size(vllm_config))
    return elements * draft.dtype.itemsize // spec.draft_parallel_config.tensor_parallel_size


def _num_aux(vllm_config: VllmConfig) -> int:
    """Aux hidden states that the head reads, as vLLM's EAGLE-3 models count them."""
    spec = vllm_config.speculative_config
    stated = getattr(spec.draft_model_config.hf_config, "num_aux_hidden_states", None)
    return stated or len(get_eagle3_aux_layers_from_config(spec) or range(3))


def _draft_vocab_size(vllm_config: VllmConfig) -> int:
    draft = vllm_config.speculative_config.draft_model_config
    return getattr(draft.hf_config, "draft_vocab_size", None) or draft.get_vocab_size()
