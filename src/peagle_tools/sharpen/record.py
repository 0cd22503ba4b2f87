"""Record a served drafter's candidates while its target answers: an engine in a process, hooks in its workers.

Sharpening and serving see the same numbers because both come from here: the rows that the drafter samples, its own
``lm_head``, its own hidden states.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from peagle_tools.shared.engines import Pair
from peagle_tools.shared.errors import ToolError
from peagle_tools.sharpen.trace import UNKNOWN, CandidateTrace
from peagle_vllm.observer import SampledRows, drafter_of
from peagle_vllm.sampling.greedy import top_candidates

SHARD = 128  # prompts
RETRY = "make room and start again, which continues from there"


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
            parts = sampled.first_positions, ids.int().view(shape), logits.view(shape), sampled.hidden_states
            # .cpu() copies nothing on a CPU, where the buffers are written again
            drafter.recorded.append(RecordedStep(sampled.req_ids, *(part.cpu().clone() for part in parts)))

    drafter.observer = record


def take(worker: Any) -> list[RecordedStep]:
    """What this worker recorded since the last call."""
    drafter = drafter_of(worker)
    if drafter is None:
        return []
    recorded, drafter.recorded = drafter.recorded, []
    return recorded


def trace_of(recorded: list[RecordedStep], texts: dict[str, tuple[int, list[int], int]]) -> CandidateTrace:
    """Drafts whose bonus token is the target's, beside what the target said then.

    Args:
        texts: the engine's own request id -> (number of the prompt, all tokens, prompt tokens).
    """
    parts = []
    for rows in recorded:
        num_k = rows.ids.shape[1]
        tokens = torch.full((len(rows.requests), num_k + 1), UNKNOWN, dtype=torch.int32)
        kept = torch.zeros(len(rows.requests), dtype=torch.bool)
        prompt = torch.zeros(len(rows.requests), dtype=torch.int32)
        for row, (request, first) in enumerate(zip(rows.requests, rows.first.tolist(), strict=True)):
            number, text, num_prompt = texts[request]
            if num_prompt < first < len(text):  # neither in the midst of a prefill nor after the end
                known = text[first - 1 : first + num_k]
                tokens[row, : len(known)] = torch.tensor(known, dtype=torch.int32)
                kept[row], prompt[row] = True, number
        parts.append(CandidateTrace(rows.ids, rows.logits, rows.hidden, tokens, prompt).rows(kept))
    return CandidateTrace.joined(parts)


def answer(engine: Any, prompts: list[tuple[int, list[int]]], params: Any) -> dict[str, tuple[int, list[int], int]]:
    """The ``texts`` of ``trace_of``. ``LLM.generate`` would not tell the ids that the engine gives the requests."""
    own_ids = {
        str(number): engine.add_request(str(number), {"prompt_token_ids": ids}, params) for number, ids in prompts
    }
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        answers |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    return {own_ids[str(number)]: (number, [*ids, *answers[str(number)]], len(ids)) for number, ids in prompts}


def shards(prompts: list[list[int]], folder: Path) -> list[tuple[Path, list[tuple[int, list[int]]]]]:
    """(file, (number of the prompt, its token ids) ...) of each shard."""
    numbered = list(enumerate(prompts))
    groups = [numbered[at : at + SHARD] for at in range(0, len(numbered), SHARD)]
    return [(folder / f"{number:05}.safetensors", group) for number, group in enumerate(groups)]


def record_all(
    pair: Pair,
    prompts: list[list[int]],
    folder: Path,
    num_k: int,
    num_candidates: int,
    max_tokens: int,
) -> None:
    """Let the target answer, and write a trace for each shard that is not there yet.

    Raises:
        ToolError: a trace cannot be written.
    """
    from vllm import SamplingParams

    wanted = [(file, group) for file, group in shards(prompts, folder) if not file.exists()]
    if not wanted:
        return
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with pair.engine(num_k, max(map(len, prompts)) + max_tokens) as llm:
        llm.collective_rpc(start, args=(num_candidates,))
        for file, group in wanted:
            texts = answer(llm.llm_engine, group, greedy)
            trace = trace_of([rows for of_worker in llm.collective_rpc(take) for rows in of_worker], texts)
            try:
                trace._replace(hidden=trace.hidden.to(torch.bfloat16)).save(file)
            except OSError as error:
                raise ToolError(f"{file} cannot be written ({error.strerror}); {RETRY}") from None
