"""The best tokens of each row, in the head's own vocabulary and in bounded memory."""

from typing import Any

import torch

from peagle_vllm.serving import logger, on_all_ranks

MAX_LOGITS_BYTES = 512 << 20  # 1,024 requests at K = 7 and 201,088 tokens would make 2.9 GB at once


def top_tokens(model: Any, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The most likely token of each row, chosen among the draft vocabulary and mapped to the target's after.

    vLLM's ``compute_logits`` would scatter every row into the target's vocabulary first. Rows whose logits exceed
    MAX_LOGITS_BYTES go in parts.

    Args:
        hidden_states: [num_rows, hidden_size] after the head's last norm.
        out: int64 of any shape with num_rows elements, to write into.

    Returns:
        ``out``, or [num_rows] int64: target token ids.
    """
    parts = [_choose(model, part) for part in _parts(model, hidden_states)]
    chosen = parts[0] if len(parts) == 1 else torch.cat(parts)
    if out is not None:
        chosen = chosen.view(out.shape)
    offsets = model.draft_id_to_target_id
    if offsets is not None:
        return torch.add(chosen, offsets[chosen], out=out)
    return chosen if out is None else out.copy_(chosen)


def _has_vllm_top_k(model: Any, row: torch.Tensor, num: int) -> bool:
    """Whether vLLM's ``get_top_k_tokens`` runs here, which gathers the shards' best instead of their logits.

    On CUDA it takes FlashInfer's top-k wherever that is installed, and FlashInfer compiles on the first use: hence the
    trial, on this rank's logits alone, since a rank that fails would leave the others waiting in a collective.
    """
    from vllm.model_executor.layers.logits_processor import _topk

    head, processor = model.lm_head, model.logits_processor
    # vLLM refuses a negative scale, and its CPU build gathers no whole numbers.
    if processor.scale <= 0 or (head.tp_size > 1 and row.is_cpu) or _is_larger(model):
        return False
    succeeded = True
    try:
        width, dtype = head.num_embeddings_per_partition, processor.head_dtype or row.dtype
        _topk(row.new_zeros(1, width, dtype=dtype), num)[0].tolist()
    except Exception as error:  # a compiler, a linker and a driver each fail in their own way
        succeeded = False
        logger.warning(
            "P-EAGLE chooses candidates with torch's top-k over whole logits, which is slower, because vLLM's does not "
            "run here (%s: %s). FlashInfer's top-k needs nvcc and ninja, or its prebuilt kernels: "
            "`vllm download-kernels`.",
            type(error).__name__,
            str(error).strip().partition("\n")[0],
        )
    return succeeded if head.tp_size == 1 else on_all_ranks(succeeded)


def top_candidates(
    model: Any, hidden_states: torch.Tensor, num: int, log_probs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``num`` best tokens of each row, best first. Equal logits come in any order.

    The first call, in vLLM's profile run or before, decides how: FlashInfer keeps what it allocates then.

    Returns:
        [num_rows, num] int64 draft token ids, and [num_rows, num] float32 logits, or log probabilities.
    """
    if not hasattr(model, "peagle_has_top_k"):
        model.peagle_has_top_k = _has_vllm_top_k(model, hidden_states[:1], num)
    parts = [_best(model, part, num, log_probs) for part in _parts(model, hidden_states)]
    if len(parts) == 1:
        return parts[0]
    ids, logits = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logits)


def _is_larger(model: Any) -> bool:
    """Whether the lm_head, a larger target's, has tokens that the head does not draft: only whole logits omit them."""
    return model.lm_head.org_vocab_size > model.logits_processor.org_vocab_size


def _parts(model: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows whose logits are at most MAX_LOGITS_BYTES; of one size, because a few rows cost a whole read of lm_head."""
    dtype = model.logits_processor.head_dtype or hidden_states.dtype
    most = max(1, MAX_LOGITS_BYTES // (model.config.draft_vocab_size * dtype.itemsize))
    return hidden_states.chunk(max(1, -(-len(hidden_states) // most)))


def _best(model: Any, hidden_states: torch.Tensor, num: int, log_probs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_rows, num] draft token ids and float32 logits, or log probabilities."""
    head, processor = model.lm_head, model.logits_processor
    if model.peagle_has_top_k:
        return processor.get_top_k_tokens(head, hidden_states, num, return_log_probs=log_probs)
    logits = processor(head, hidden_states)
    best, ids = logits.topk(num)
    best = best.float()
    return ids, best - logits.float().logsumexp(-1, keepdim=True) if log_probs else best


def _choose(model: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """[num_rows] draft token ids."""
    head, processor = model.lm_head, model.logits_processor
    # Where the head is sharded, gather the shards' best instead of their logits; vLLM refuses that where a negative
    # scale turns the order around.
    if head.tp_size > 1 and processor.scale > 0 and not _is_larger(model):
        return processor.get_top_tokens(head, hidden_states)
    return processor(head, hidden_states).argmax(dim=-1)
