"""Record a served drafter's candidates: hooks on one drafter, in its own worker process.

Sharpening and serving see the same numbers because both come from here: the rows that the drafter samples, its own
``lm_head``, its own hidden states.
"""

from typing import Any, NamedTuple

import torch

from peagle_vllm.greedy import choose_top_k, top_candidates
from peagle_vllm.sharpen.lattice import UNKNOWN, Lattice


class Rows(NamedTuple):
    """One step's drafts as they are made; the target's tokens are known later."""

    requests: list[str]
    first: torch.Tensor  # [n] position of the first draft token
    ids: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor


def drafter_of(worker: Any) -> Any:
    """V2's speculator or V1's proposer; None where another pipeline stage drafts."""
    runner = worker.model_runner
    return getattr(runner, "speculator", None) or getattr(runner, "drafter", None)


def start(worker: Any, num_candidates: int) -> None:
    """Begin to record in this worker; the first tensor parallel rank records for all."""
    from vllm.distributed import get_tensor_model_parallel_rank

    drafter, is_first = drafter_of(worker), get_tensor_model_parallel_rank() == 0
    if drafter is None:
        return
    row = torch.zeros(1, drafter.hidden_size, dtype=drafter.dtype, device=drafter.device)
    choose_top_k(drafter.model, row, num_candidates)
    drafter.recorded = []
    method = "_sample" if hasattr(drafter, "cudagraph_manager") else "_sample_draft_tokens"
    original = getattr(drafter, method)

    def sample(*args: Any) -> Any:
        """V2 passes (batch, hidden states of all rows), V1 (hidden states of the sampled rows, metadata)."""
        buffers, num_k = drafter.buffers, drafter.vllm_config.num_speculative_tokens
        if method == "_sample":
            num_samples = args[0].layout.num_reqs_padded * args[0].samples_per_req
            sampled, requests = args[1][buffers.sample_indices[:num_samples]], drafter.recorded_requests
        else:
            sampled, requests = args[0], list(drafter.runner.input_batch.req_ids)
        ids, logits = top_candidates(drafter.model, sampled, num_candidates)
        if is_first:
            shape = (-1, num_k, num_candidates)
            first = buffers.sample_pos[: len(sampled)].view(-1, num_k)[:, 0] + 1
            parts = first, ids.int().view(shape), logits.view(shape), sampled.view(-1, num_k, sampled.shape[-1])
            # .cpu() copies nothing on a CPU, where the buffers are written again
            drafter.recorded.append(Rows(requests, *(part[: len(requests)].cpu().clone() for part in parts)))
        return original(*args)

    setattr(drafter, method, sample)
    if method == "_sample":
        propose = drafter.propose

        def propose_and_note(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            drafter.recorded_requests = list(input_batch.req_ids)
            return propose(input_batch, *args, **kwargs)

        drafter.propose = propose_and_note


def take(worker: Any) -> list[Rows]:
    """What this worker recorded since the last call."""
    drafter = drafter_of(worker)
    if drafter is None:
        return []
    recorded, drafter.recorded = drafter.recorded, []
    return recorded


def lattice_of(recorded: list[Rows], texts: dict[str, tuple[int, list[int], int]]) -> Lattice:
    """Drafts whose bonus token is the target's, beside what the target said then.

    Args:
        texts: request id -> (number of the prompt, all tokens, prompt tokens).
    """
    parts = []
    for rows in recorded:
        num_k = rows.ids.shape[1]
        tokens = torch.full((len(rows.requests), num_k + 1), UNKNOWN, dtype=torch.int32)
        kept = torch.zeros(len(rows.requests), dtype=torch.bool)
        prompt = torch.zeros(len(rows.requests), dtype=torch.int32)
        for row, (request, first) in enumerate(zip(rows.requests, rows.first.tolist(), strict=True)):
            number, text, num_prompt = texts[request.rpartition("-")[0]]  # vLLM appends "-" and random characters
            if num_prompt < first < len(text):  # neither in the midst of a prefill nor after the end
                known = text[first - 1 : first + num_k]
                tokens[row, : len(known)] = torch.tensor(known, dtype=torch.int32)
                kept[row], prompt[row] = True, number
        parts.append(Lattice(rows.ids, rows.logits, rows.hidden, tokens, prompt).rows(kept))
    return Lattice.joined(parts)
