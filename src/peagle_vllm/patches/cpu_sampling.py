"""vLLM's CPU build samples garbage at temperature > 0 with any speculation, and top-k alone ends its engine.

_expand_kernel_impl converts its float output to int64 and writes into that copy, so per-request temperatures, top-k and
top-p never reach the verified rows. apply_top_k_only takes the largest top-k of the verified rows, and raises where
there are none, as in a batch of prompts.
"""

from peagle_vllm.patches.ledger import Patch

PATCH = Patch(name="cpu-sampling", runner="CPU")
serving_peagle = False  # set by v1-proposer, for good: what is wrapped here has no configuration at hand


@PATCH.wraps("vllm.utils.cpu_triton_utils", "_expand_kernel_impl")
def _expand_kernel_impl(original, output, input_val, cu_num_tokens, replace_from, replace_to, *args, **kwargs):
    if not serving_peagle:
        return original(output, input_val, cu_num_tokens, replace_from, replace_to, *args, **kwargs)
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts, output_size=output.shape[0]))


@PATCH.wraps("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_only")
def apply_top_k_only(original, logits, *args, **kwargs):
    if serving_peagle and not len(logits):
        return logits
    return original(logits, *args, **kwargs)
