"""vLLM's connector for hidden states, on a CPU: its own copies through CUDA streams and pinned memory."""

from types import SimpleNamespace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllm_states

# In place of a CUDA event: what it waits for has happened.
PAST = SimpleNamespace(query=lambda: True, synchronize=lambda: None)


class CpuHiddenStates(vllm_states.ExampleHiddenStatesConnector):
    """Writes a request's hidden states in the step that finds it finished."""

    def _submit_async_write(self, pending: vllm_states.PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        first = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (first + torch.arange(self._block_size)).flatten()
        states = vllm_states.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        self._req_copy_events[pending.req_id] = PAST
        lock = self._lock_fds.pop(pending.req_id, None)
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        self._write_tensors(tensors, PAST, pending.filename, lock)
