"""On V1, one request within K tokens of max_model_len stops drafting for the whole batch.

The geometry handles the end of a sequence, so P-EAGLE drafts on.
"""

from peagle_vllm.patches.ledger import Patch
from peagle_vllm.serving import is_peagle

PATCH = Patch(name="drafter-limit", runner="V1")


@PATCH.wraps("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._input_fits_in_drafter")
def _input_fits_in_drafter(original, self, common_attn_metadata, *args, **kwargs):
    if is_peagle(self.vllm_config) and common_attn_metadata is not None:
        # A shorter limit that the user set for the drafter holds; the head's own max_position_embeddings does not,
        # since its rotary embedding has the target's length.
        limit = self.speculative_config.max_model_len
        if limit is None or limit >= self.max_model_len:
            return True
    return original(self, common_attn_metadata, *args, **kwargs)
