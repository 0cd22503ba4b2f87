"""The line that the log has of P-EAGLE at the start."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from vllm.v1.kv_cache_interface import KVCacheConfig

from peagle_vllm.heads.fields import TRAINED_DEPTH
from peagle_vllm.kv_groups import kv_bytes_a_token
from peagle_vllm.lookup import prompt_lookup_min
from peagle_vllm.serving import is_first_rank, logger


def log_start(drafter: Any, kv_cache_config: KVCacheConfig, num_graphs: int | None = None) -> None:
    """Say once (data parallel: on each machine) that P-EAGLE is served: the runner, K, depth trained, graphs, memory.

    Args:
        drafter: V1's proposer or V2's speculator, with its head and its buffers; V1's may have more in its ``history``.
        num_graphs: CUDA graphs of drafts; None where they are the target's.
    """
    vllm_config = drafter.vllm_config
    spec = vllm_config.speculative_config
    is_measuring = vllm_config.cache_config.num_gpu_blocks is None  # vLLM measures CUDA graphs before the start
    if is_measuring or vllm_config.parallel_config.data_parallel_rank_local or not is_first_rank():
        return
    depth = getattr(spec.draft_model_config.hf_config, TRAINED_DEPTH, None)
    parts = [f"Model Runner {'V2' if vllm_config.use_v2_model_runner else 'V1'}", f"K={spec.num_speculative_tokens}"]
    parts += [f"head trained {depth} deep"] if depth else []
    lookup = prompt_lookup_min(vllm_config)
    parts += [f"drafts looked up from {lookup} tokens on"] if lookup else []
    parts += [f"{num_graphs or 'no'} graphs"] if num_graphs is not None else []
    if drafter.device.type != "cpu":  # vLLM's CPU build packs linear layers, and no tensor shows their size
        tensors = ((*module._parameters.values(), *module._buffers.values()) for module in drafter.updates.own_modules)
        parts.append(f"head {_mebibytes(list(tensors))}")
    scheduler = vllm_config.scheduler_config
    num_k = spec.num_speculative_tokens  # a request that decodes takes K + 1 rows, and K - 1 more for drafts
    room = (scheduler.max_num_batched_tokens + num_k) // (2 * num_k)
    if room < scheduler.max_num_seqs and not spec.num_speculative_tokens_per_batch_size:
        parts.append(f"{room} of {scheduler.max_num_seqs} requests at once (max_num_batched_tokens)")
    parts.append(f"buffers {_mebibytes([vars(each) for each in (drafter, getattr(drafter, 'history', None)) if each])}")
    parts.append(f"KV {kv_bytes_a_token(drafter.model, vllm_config, kv_cache_config)} bytes a token")
    logger.info("P-EAGLE active: %s", ", ".join(parts))


def _mebibytes(values: Any) -> str:
    """Memory of all tensors in lists, tuples and dicts; what several of them share counts once."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    num_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return f"{num_bytes / 2**20:.1f} MiB"
