"""Record a served drafter's candidates while its target answers, with hooks in the engine's workers.

Sharpening and serving see the same numbers because both come from here: the rows that the drafter samples, its own
``lm_head``, its own hidden states.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from peagle_tools.shared.engines import Pair, generate
from peagle_tools.sharpen.trace import UNKNOWN, CandidateTrace
from peagle_vllm.observer import SampledRows, drafter_of
from peagle_vllm.sampling.greedy import top_candidates

SHARD = 128  # prompts


class RecordedAnswer(NamedTuple):
    """What the target answered to one prompt."""

    number: int  # of the prompt
    tokens: list[int]  # prompt and answer
    num_prompt: int  # tokens


class RecordedStep(NamedTuple):
    """One step's drafts as they are made; the target's tokens are known later."""

    requests: list[str]
    first: torch.Tensor  # [n] position of the first draft token
    ids: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor


def start(worker: Any, num_candidates: int) -> None:
    """Begin to record in this worker; the first tensor parallel rank records for all."""
    from vllm.distributed import get_tensor_model_parallel_rank

    drafter, is_first = drafter_of(worker), get_tensor_model_parallel_rank() == 0
    if drafter is None:
        return
    drafter.recorded = []

    def record(sampled: SampledRows) -> None:
        num_reqs, num_k, _ = sampled.hidden_states.shape
        # Every rank takes part where candidates are gathered over the shards of the head.
        ids, logits = top_candidates(drafter.model, sampled.hidden_states.flatten(0, 1), num_candidates)
        if is_first:
            shape = (num_reqs, num_k, num_candidates)
            tensors = sampled.first_positions, ids.int().view(shape), logits.view(shape), sampled.hidden_states
            # .cpu() copies nothing on a CPU, where the buffers are written again
            drafter.recorded.append(RecordedStep(sampled.req_ids, *(tensor.cpu().clone() for tensor in tensors)))

    drafter.observer = record


def take(worker: Any) -> list[RecordedStep]:
    """What this worker recorded since the last call."""
    drafter = drafter_of(worker)
    if drafter is None:
        return []
    recorded, drafter.recorded = drafter.recorded, []
    return recorded


def trace_of(recorded: list[RecordedStep], answers: dict[str, RecordedAnswer]) -> CandidateTrace:
    """Drafts whose bonus token is the target's, with the target's own tokens there.

    Args:
        answers: by ``LLM.generate``'s request ids, to which vLLM appends "-" and random characters in the engine.
    """
    parts = []
    for step in recorded:
        num_k = step.ids.shape[1]
        kept: list[int] = []
        tokens: list[list[int]] = []
        prompts: list[int] = []
        for row, (request, first) in enumerate(zip(step.requests, step.first.tolist(), strict=True)):
            answer = answers[request.rpartition("-")[0] or request]
            if answer.num_prompt < first < len(answer.tokens):  # neither in the midst of a prefill nor after the end
                known = answer.tokens[first - 1 : first + num_k]
                kept.append(row)
                tokens.append(known + [UNKNOWN] * (num_k + 1 - len(known)))
                prompts.append(answer.number)
        drafts = step.ids[kept], step.logits[kept], step.hidden[kept]
        truth = torch.tensor(tokens, dtype=torch.int32).view(-1, num_k + 1)
        parts.append(CandidateTrace(*drafts, truth, torch.tensor(prompts, dtype=torch.int32)))
    return CandidateTrace.joined(parts)


def record_all(
    pair: Pair, prompts: list[list[int]], folder: Path, num_k: int, num_candidates: int, max_tokens: int
) -> None:
    """Let the target answer, and write a trace of each SHARD prompts. Raises ToolError where one cannot be written."""
    with pair.engine(num_k, prompts, max_tokens) as llm:
        llm.collective_rpc(start, args=(num_candidates,))
        for begin in tqdm(range(0, len(prompts), SHARD), "record", leave=False, disable=None):
            some = prompts[begin : begin + SHARD]
            outputs = generate(llm, some, max_tokens)
            answers = {
                output.request_id: RecordedAnswer(number, [*ids, *output.outputs[0].token_ids], len(ids))
                for number, (ids, output) in enumerate(zip(some, outputs, strict=True), start=begin)
            }
            trace = trace_of([step for of_worker in llm.collective_rpc(take) for step in of_worker], answers)
            trace._replace(hidden=trace.hidden.to(torch.bfloat16)).save(folder / f"{begin:06}.safetensors")
