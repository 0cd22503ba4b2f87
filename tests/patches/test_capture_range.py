"""V1's sizes of graphs with and without the patch: vLLM's dispatchers, no GPU."""

from types import SimpleNamespace
from typing import Any

import pytest

from peagle_vllm import plugin

plugin.register()


def configured(seqs: int, k: int, budget: int, mode: str = "FULL_AND_PIECEWISE", **changes: Any) -> Any:
    """The part of a V1 VllmConfig that sizes of graphs depend on, as vLLM leaves it when its engine starts.

    Args:
        changes: ``parallel_drafting``, and fields of CompilationConfig that a user has set.
    """
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig
    from vllm.v1.attention.backend import AttentionCGSupport

    spec = SimpleNamespace(method="eagle3", uses_dynamic_speculative_decoding=lambda: False)
    spec.parallel_drafting = changes.pop("parallel_drafting", True)
    model = SimpleNamespace(enforce_eager=False, rswa_window=None, is_mm_prefix_lm=False)
    model.hf_config, model.get_num_attention_heads = SimpleNamespace(model_type="llama"), lambda parallel_config: 32
    changes |= {"mode": CompilationMode.VLLM_COMPILE, "cudagraph_mode": CUDAGraphMode[mode]}
    compilation = CompilationConfig(splitting_ops=list(CompilationConfig._attention_ops), **changes)
    config = SimpleNamespace(
        model_config=model,
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=budget),
        speculative_config=spec,
        num_speculative_tokens=k,
        uniform_decode_query_len=k + 1,
        use_v2_model_runner=False,
        performance_mode="balanced",
        lora_config=None,
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
    )
    VllmConfig._set_cudagraph_sizes(config)
    backend = AttentionCGSupport.ALWAYS, "FLASH_ATTN"
    compilation.resolve_cudagraph_mode_and_sizes(*backend, k + 1, use_v2_model_runner=False)
    return config


def dispatchers(config: Any) -> tuple[Any, Any]:
    """The target's and the drafter's, set up as the V1 runner does; twice, as without ``kv_cache_memory_bytes``."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    target, drafter = CudagraphDispatcher(config), CudagraphDispatcher(config)
    mode = config.compilation_config.cudagraph_mode
    for _ in range(2):
        for keys in (*target.cudagraph_keys.values(), *drafter.cudagraph_keys.values()):
            keys.clear()
        target.initialize_cudagraph_keys(mode, config.uniform_decode_query_len)
        drafter.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE)
    return target, drafter


def sizes(dispatcher: Any, mode: str) -> list[int]:
    from vllm.config import CUDAGraphMode

    return sorted(key.num_tokens for key in dispatcher.cudagraph_keys[CUDAGraphMode[mode]])


@pytest.mark.parametrize(
    ("seqs", "k", "budget"), [(1024, 7, 8192), (256, 7, 8192), (64, 3, 2048), (1024, 1, 16_384), (8, 18, 512)]
)
def test_full_graphs_keep_vllms_sizes_and_piecewise_ones_reach_the_drafts(seqs: int, k: int, budget: int):
    target, drafter = dispatchers(configured(seqs, k, budget))
    stock, _ = dispatchers(configured(seqs, k, budget, parallel_drafting=False))
    assert sizes(target, "FULL") == sizes(stock, "FULL")
    stock_sizes, extended = sizes(stock, "PIECEWISE"), sizes(target, "PIECEWISE")
    assert sizes(drafter, "PIECEWISE") == extended, "the target's capture captures the drafter's graphs"
    assert [size for size in extended if size <= stock_sizes[-1]] == stock_sizes
    assert extended[-1] <= budget
    assert extended[-1] > min(stock_sizes[-1] + k * seqs, budget) - (k + 1)
    drafts = [2 * k * n for n in range(1, seqs + 1) if 2 * k * n <= extended[-1]]
    assert 2 * k * seqs <= stock_sizes[-1] or drafts[-1] > stock_sizes[-1]
    for rows in drafts:
        mode, desc = drafter.dispatch(rows)
        assert mode.name == "PIECEWISE"
        assert desc.num_tokens in extended
        assert desc.num_tokens - rows < max(17 * k, 16 * (k + 1), rows / 8)
    # A decode batch beyond the full graphs is served in pieces; vLLM asserts that it is padded to whole requests.
    for rows in range(k + 1, min(seqs * (k + 1), budget) + 1, k + 1):
        mode, desc = target.dispatch(rows, uniform_decode=True)
        if rows <= sizes(stock, "FULL")[-1]:
            assert (mode, desc) == stock.dispatch(rows, uniform_decode=True)
        else:
            assert mode.name == ("PIECEWISE" if rows <= extended[-1] else "NONE")


def test_nothing_grows_but_piecewise_graphs_of_peagle_whose_sizes_vllm_has_chosen():
    """Attention builders read the configuration, and FlashAttention 3 allocates 32 splits of the largest size there."""
    grown = configured(1024, 7, 8192)
    dispatchers(grown)
    stock = configured(1024, 7, 8192, parallel_drafting=False).compilation_config
    assert grown.compilation_config.cudagraph_capture_sizes == stock.cudagraph_capture_sizes
    assert grown.compilation_config.max_cudagraph_capture_size == stock.max_cudagraph_capture_size
    for asked in ({"max_cudagraph_capture_size": 1024}, {"cudagraph_capture_sizes": [8, 16, 64]}):
        target, drafter = dispatchers(configured(1024, 7, 8192, **asked))
        assert sizes(drafter, "PIECEWISE") == sizes(target, "PIECEWISE")
        assert sizes(target, "PIECEWISE")[-1] == sizes(target, "FULL")[-1] in (64, 1024)
    target, _ = dispatchers(configured(1024, 7, 8192, mode="FULL_DECODE_ONLY"))
    assert target.compilation_config is target.vllm_config.compilation_config
