"""The best tokens of each row, in the head's own vocabulary and in bounded memory."""

import logging
from typing import Any

import torch

logger = logging.getLogger("vllm.peagle")  # under vLLM's own handler

MAX_LOGITS_BYTES = 512 << 20  # 1,024 requests at K = 7 and 201,088 tokens would make 2.9 GB at once


def top_tokens(model: Any, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The most likely token of each row, chosen among the draft vocabulary and mapped to the target's after.

    vLLM's ``compute_logits`` would scatter every row into the target's vocabulary first. Rows whose logits exceed
    MAX_LOGITS_BYTES go in parts.

    Args:
        model: a vLLM EAGLE-3 head.
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


@torch.inference_mode()
def choose_top_k(model: Any, row: torch.Tensor, num: int) -> None:
    """Decide how ``top_candidates`` finds the best tokens; called once, when a head is loaded.

    vLLM's ``get_top_k_tokens`` gathers the shards' best instead of their logits. On CUDA it takes FlashInfer's top-k
    wherever that is installed, and FlashInfer compiles on the first use: hence the trial. Where it fails, torch's
    top-k takes whole logits.

    Args:
        row: [1, hidden_size] any hidden state.
        num: of candidates.
    """
    head, processor = model.lm_head, model.logits_processor
    # vLLM refuses a negative scale, and its CPU build gathers no whole numbers.
    model.has_vllm_top_k = processor.scale > 0 and not (head.tp_size > 1 and row.is_cpu)
    if not model.has_vllm_top_k:
        return
    try:
        processor.get_top_k_tokens(head, row, num)[0].tolist()
    except Exception as error:  # a compiler, a linker and a driver each fail in their own way
        model.has_vllm_top_k = False
        logger.warning(
            "P-EAGLE chooses candidates with torch's top-k over whole logits, which is slower, because vLLM's does not "
            "run here (%s: %s). FlashInfer's top-k needs nvcc and ninja, or its prebuilt kernels: "
            "`vllm download-kernels`.",
            type(error).__name__,
            str(error).strip().partition("\n")[0],
        )


def top_candidates(
    model: Any, hidden_states: torch.Tensor, num: int, log_probs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``num`` best tokens of each row, best first, after ``choose_top_k``. Equal logits come in any order.

    Returns:
        [num_rows, num] int64 draft token ids, and [num_rows, num] float32 logits, or log probabilities.
    """
    parts = [_best(model, part, num, log_probs) for part in _parts(model, hidden_states)]
    if len(parts) == 1:
        return parts[0]
    ids, logits = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logits)


def _parts(model: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows whose logits are at most MAX_LOGITS_BYTES."""
    dtype = model.logits_processor.head_dtype or hidden_states.dtype
    row_bytes = model.config.draft_vocab_size * dtype.itemsize
    return hidden_states.split(max(1, MAX_LOGITS_BYTES // row_bytes))


def _best(model: Any, hidden_states: torch.Tensor, num: int, log_probs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_rows, num] draft token ids and float32 logits, or log probabilities."""
    head, processor = model.lm_head, model.logits_processor
    if model.has_vllm_top_k:
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
    if head.tp_size > 1 and processor.scale > 0:
        return processor.get_top_tokens(head, hidden_states)
    return processor(head, hidden_states).argmax(dim=-1)
