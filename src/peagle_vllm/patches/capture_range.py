"""On V1 a P-EAGLE draft batch is larger than the largest piecewise graph."""

from types import ModuleType

from peagle_vllm.patches.ledger import Patch
from peagle_vllm.patches.patching import wrap
from peagle_vllm.serving import is_peagle

PATCH = Patch(
    name="capture-range",
    runner="V1",
    why="A decode batch of n requests verifies (K+1)n rows but drafts 2K*n, so drafts outgrow the captured sizes; "
    "the range grows by K x max_num_seqs.",
    waits_for="nothing: vLLM has deprecated the V1 runner, and V2's drafter captures its own sizes",
    delete_when="vLLM drops the V1 model runner",
    depends_on={
        "vllm.config.vllm": ("VllmConfig._set_cudagraph_sizes",),
        "vllm.config.compilation": ("CompilationConfig.post_init_cudagraph_sizes",),
    },
)


def extended_sizes(sizes: list[int], num_k: int, max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """Capture sizes (tokens, ascending) grown by the draft batches 2K*n up to K*max_num_seqs more.

    Request counts go in vLLM's own steps, so that the number of graphs stays comparable.
    """
    ceiling = min(max(sizes) + num_k * max_num_seqs, max_num_tokens)
    counts = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16), max_num_seqs]
    drafts = {2 * num_k * n for n in counts if n <= max_num_seqs}
    return sorted({*sizes, *(size for size in drafts if max(sizes) < size <= ceiling), ceiling})


def install(module: ModuleType) -> None:
    def make(original):
        def _set_cudagraph_sizes(self, *args, **kwargs):
            config = self.compilation_config
            chosen_by_user = config.cudagraph_capture_sizes is not None or config.max_cudagraph_capture_size is not None
            original(self, *args, **kwargs)
            if chosen_by_user or not is_peagle(self) or self.use_v2_model_runner or not config.cudagraph_capture_sizes:
                return
            scheduler = self.scheduler_config
            sizes = extended_sizes(
                config.cudagraph_capture_sizes,
                self.num_speculative_tokens,
                scheduler.max_num_seqs,
                scheduler.max_num_batched_tokens,
            )
            config.cudagraph_capture_sizes = sizes
            config.max_cudagraph_capture_size = sizes[-1]
            config.post_init_cudagraph_sizes()

        return _set_cudagraph_sizes

    wrap(module.VllmConfig, "_set_cudagraph_sizes", make)
