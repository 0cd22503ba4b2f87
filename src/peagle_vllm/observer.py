"""What a tool may see of a drafter while it serves: the rows that it samples. Nothing is observed unless a tool asks.

An observer is called from Python, so the engine must run eagerly: a CUDA graph would replay without it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class SampledRows(NamedTuple):
    """The sampled rows of one draft step."""

    req_ids: list[str]
    first_positions: torch.Tensor  # [num_reqs] int64, position of the first draft token
    hidden_states: torch.Tensor  # [num_reqs, K, hidden_size] after the head's last norm


Observer = Callable[[SampledRows], None]  # set it as a drafter's ``observer``


def drafter_of(worker: Any) -> Any:
    """V2's speculator or V1's proposer of a vLLM worker; None where another pipeline stage drafts."""
    runner = worker.model_runner
    return getattr(runner, "speculator", None) or getattr(runner, "drafter", None)


def sampled_rows(req_ids: list[str], num_k: int, sample_pos: torch.Tensor, hidden_states: torch.Tensor) -> SampledRows:
    """Those of real requests, of [num_samples] positions before the sampled tokens, and as many hidden states."""
    first = sample_pos.view(-1, num_k)[: len(req_ids), 0] + 1
    return SampledRows(req_ids, first, hidden_states.view(-1, num_k, hidden_states.shape[-1])[: len(req_ids)])
