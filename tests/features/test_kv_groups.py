"""How many KV cache groups a head makes of its target's: at real layer counts, and in engines."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.drafts import targets
from tests.drafts.targets import WINDOW
from tests.support.engines import Engine, Request, Settings, engine
from tests.support.random_heads import HEAD_DIM, HeadSpec, prompt, write_head, write_pair
from tests.support.recorder import serve_exactly
from tests.support.reference import Reference

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

Layer = tuple[int, int, int | None]  # KV heads, head size, window
GPT_OSS: list[Layer] = [(8, 64, 128), (8, 64, None)]
GEMMA4: list[Layer] = [*[(4, 256, 512)] * 5, (4, 512, None)]  # transformers' Gemma4TextConfig
# Groups, and layers of the largest: without a head, and with four layers of the target's kind that sees all, of one
# twice as wide, and of one with a window of its own, as vLLM groups it. The plugin has the last counted as the first.
REAL = {
    "Llama 3.1 8B": ([(8, 128, None)] * 32, (1, 32), (1, 36), (1, 36), (9, 4)),
    "gpt-oss-20b": (GPT_OSS * 12, (2, 12), (2, 16), (7, 4), (7, 4)),
    "gpt-oss-120b": (GPT_OSS * 18, (2, 18), (2, 22), (11, 4), (11, 4)),
    "Gemma 4": (GEMMA4 * 5, (6, 5), (4, 9), (10, 4), (10, 4)),
}


def num_groups(target: list[Layer], head: list[Layer]) -> tuple[int, int]:
    """Groups, and layers of the largest."""
    import torch

    try:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # since vLLM 0.33
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    specs = {}
    for i, (heads, size, window) in enumerate([*target, *head]):
        shape = {"block_size": 16, "num_kv_heads": heads, "head_size": size, "dtype": torch.bfloat16}
        specs[str(i)] = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False)),
        speculative_config=None,
        model_config=None,
    )
    groups = get_kv_cache_groups(config, specs)
    return len(groups), max(len(group.layer_names) for group in groups)


@pytest.mark.arm("plugin-v1")
@pytest.mark.parametrize("name", REAL)
def test_groups_at_real_layer_counts(name: str):
    layers, *expected = REAL[name]
    full = next(layer for layer in layers if layer[2] is None)
    other, windowed = (full[0], 2 * full[1], None), (*full[:2], 2048)
    heads = {"no head": [], "as the target": [full] * 4, "another width": [other] * 4, "a window": [windowed] * 4}
    counted = [num_groups(layers, head) for head in heads.values()]
    for kind, (groups, size) in zip(heads, counted, strict=True):
        print(f"{name}, {kind}: {groups} groups of {size}")
    assert counted == expected


def groups(live: Engine) -> int:
    return len(live.scheduler.kv_cache_config.kv_cache_groups)


def test_a_windowed_head_makes_no_groups(tmp_path: Path):
    target, head = write_pair(tmp_path, HeadSpec(windows=(8, 8)))
    live, reference = engine(Settings(target, head, k=3, max_model_len=96)), Reference(target, head)
    assert groups(live) == 1
    report, _ = serve_exactly(live, [Request("a", prompt(30), 12), Request("b", prompt(9, 1), 12)], reference)
    assert report.rows > 6


def test_where_a_head_splits_the_groups_the_log_says_so(tmp_path: Path, warned):
    target = targets.write(tmp_path, "mistral")
    live = engine(Settings(target, write_head(tmp_path / "head", target, HeadSpec()), k=3, max_model_len=96))
    assert groups(live) == 5
    kinds = f"(1 KV heads of {HEAD_DIM}) are unlike all of the target's (1 KV heads of {HEAD_DIM}, window {WINDOW})"
    assert len(warned(f"splits the KV cache into 5 groups, because 2 of the head's layers {kinds}. Each")) == 1
    like = write_head(tmp_path / "like", target, HeadSpec(windows=(WINDOW,) * 2))
    assert groups(engine(Settings(target, like, k=3, max_model_len=96))) == 1
    assert len(warned("splits the KV cache")) == 1
