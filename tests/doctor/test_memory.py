"""``doctor --model --speculative-config``: what drafting takes, or why vLLM would not serve it, in one line."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from peagle_tools.doctor.memory import drafting, lines
from peagle_tools.shared.errors import ToolError
from tests.support.models import PEAGLE as HEAD
from tests.support.models import TARGET

pytestmark = pytest.mark.arm("plugin-v1")

PEAGLE = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 5, "parallel_drafting": True}


def drafts(speculative: dict[str, Any] | str, *flags: str) -> Any:
    config = speculative if isinstance(speculative, str) else json.dumps(speculative)
    return drafting(["--model", str(TARGET), "--speculative-config", config, *flags])


def test_what_a_gpu_would_be_asked_for(monkeypatch: pytest.MonkeyPatch):
    """A CPU has no graphs, so the platform's answer is replaced: sizes as a GPU's configuration has them."""
    from vllm.config.compilation import CUDAGraphMode

    from peagle_vllm.v2 import memory

    assert drafts(PEAGLE, "--max-num-seqs", "8")["full_graphs"] == 0
    original = memory.draft_graphs

    def with_graphs(config: Any, mode: Any) -> Any:
        sizes = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8], max_cudagraph_capture_size=8)
        parts = {name: getattr(config, name) for name in ("scheduler_config", "speculative_config")}
        config = SimpleNamespace(num_speculative_tokens=5, compilation_config=sizes, **parts)
        return original(config, CUDAGraphMode.FULL_AND_PIECEWISE)

    monkeypatch.setattr(memory, "draft_graphs", with_graphs)
    sizes = drafts(PEAGLE, "--max-num-seqs", "8")
    assert (sizes["num_speculative_tokens"], sizes["max_num_seqs"]) == (5, 8)
    assert sizes["full_graph_requests"] == 8
    assert sizes["piecewise_rows"] == 120  # 8 requests decode in 80, and room for prefills beside them
    assert sizes["buffers_bytes"] > (8 * 6 + 1) * 3 * 128 * 4
    assert sizes["head_kv_bytes_per_token"] == 4 * 2 * 2 * 32 * 2  # layers, key and value, heads, width, bfloat16
    drawn = drafts({**PEAGLE, "draft_sample_method": "probabilistic"}, "--max-num-seqs", "8")
    assert drawn["buffers_bytes"] == sizes["buffers_bytes"] + 8 * 5 * 512 * 2  # logits in bfloat16
    assert any("bytes of KV cache a token" in value for _, value in lines(sizes))
    assert any("120 rows" in value for _, value in lines(sizes))


@pytest.mark.parametrize(
    ("speculative", "line"),
    [
        ("{", "argument --speculative-config"),
        ({**PEAGLE, "parallel_drafting": False}, "not P-EAGLE"),
        ({**PEAGLE, "num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
)
def test_what_would_not_be_served_is_one_line(speculative: Any, line: str):
    with pytest.raises(ToolError, match=line) as caught:
        drafts(speculative)
    assert "\n" not in str(caught.value)
