"""The tokens of requests on the device. vLLM's V1 runner has them on the host, and there a step late."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata


def token_indices(cad: CommonAttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_tokens] int64 each, of verified tokens: the request in the batch, and the index there (not M-RoPE's)."""
    lengths, device = np.diff(cad.query_start_loc_cpu.numpy()), cad.seq_lens.device
    request = async_tensor_h2d(np.repeat(np.arange(len(lengths)), lengths), device=device)
    before = cad.seq_lens[: len(lengths)] - cad.query_start_loc[1 : len(lengths) + 1]
    return request, torch.arange(len(request), device=device) + before[request]


def known_tokens(request: Any) -> np.ndarray:
    """[num_tokens] int32 of vLLM's ``CachedRequestState``; 0 for embeddings and for outputs that are yet to come."""
    prompt = np.zeros(request.num_prompt_tokens, dtype=np.int32)
    if request.prompt_token_ids is not None:
        np.copyto(prompt, request.prompt_token_ids, where=request.prompt_is_token_ids or True)
    return np.maximum(np.concatenate((prompt, np.array(request.output_token_ids, dtype=np.int32))), 0)


class TokenHistory:
    """Every known token of the requests in a batch."""

    def __init__(self, max_num_reqs: int, max_model_len: int, device: torch.device):
        self.token_ids = torch.zeros(max_num_reqs, max_model_len + 1, dtype=torch.int32, device=device)
        self.rows = torch.zeros(1, dtype=torch.int64, device=device)  # [num_reqs], the batch's rows of it
        self.last = torch.zeros_like(self.rows)  # [num_reqs], index of the last known token, the bonus token
        self._rows: dict[str, tuple[Any, int]] = {}  # by request id: vLLM's state of the request, and its row

    def update(
        self,
        req_ids: Sequence[str],
        requests: dict[str, Any],
        cad: CommonAttentionMetadata,
        num_rejected: torch.Tensor,  # [num_reqs]
        token_ids: torch.Tensor,  # [num_tokens], verified
        next_token_ids: torch.Tensor,  # [num_reqs]
    ) -> None:
        """Add a step's verified tokens and bonus tokens; a new request's prompt too, for what is not computed here."""
        device = self.token_ids.device
        # A later request can have the id of an earlier one, but not its state.
        new = [req for req in req_ids if self._rows.get(req, (None,))[0] is not requests[req]]
        if new:
            known = set(req_ids) - set(new)
            self._rows = {req: row for req, row in self._rows.items() if req in known}
            free = sorted(set(range(len(self.token_ids))) - {row for _, row in self._rows.values()})
            for req, row in zip(new, free, strict=False):
                self._rows[req] = requests[req], row
                tokens = known_tokens(requests[req])
                self.token_ids[row].zero_()
                self.token_ids[row, : len(tokens)] = async_tensor_h2d(tokens, device=device)
        self.rows = async_tensor_h2d(np.array([self._rows[req][1] for req in req_ids]), device=device)
        request, index = token_indices(cad)
        self.token_ids[self.rows[request], index] = token_ids[: len(request)].int()
        self.last = (cad.seq_lens[: len(req_ids)] - num_rejected).long()
        self.token_ids[self.rows, self.last] = next_token_ids[: len(req_ids)].int()
