"""The line that the log has of P-EAGLE at the start."""

from vllm.config import VllmConfig
from vllm.logger import init_logger

from peagle_vllm.heads.fields import TRAINED_DEPTH
from peagle_vllm.lookup import prompt_lookup_min
from peagle_vllm.serving import logger


def log_start(vllm_config: VllmConfig, num_graphs: int | None = None) -> None:
    """Say once on each machine that P-EAGLE is served: the runner, K, the head's trained depth, and graphs.

    Args:
        num_graphs: CUDA graphs of drafts; None where they are the target's.
    """
    spec = vllm_config.speculative_config
    if vllm_config.parallel_config.data_parallel_rank_local:
        return
    depth = getattr(spec.draft_model_config.hf_config, TRAINED_DEPTH, None)
    parts = [f"Model Runner {'V2' if vllm_config.use_v2_model_runner else 'V1'}", f"K={spec.num_speculative_tokens}"]
    parts += [f"head trained {depth} deep"] if depth else []
    lookup = prompt_lookup_min(vllm_config)
    parts += [f"drafts looked up from {lookup} tokens on"] if lookup else []
    parts += [f"{num_graphs or 'no'} graphs"] if num_graphs is not None else []
    init_logger(logger.name).info_once("P-EAGLE active: %s", ", ".join(parts))
