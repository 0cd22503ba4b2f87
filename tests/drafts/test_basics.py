"""The smallest draft tests, one for each thing that can go wrong. ``tests/mutants`` names them.

Each runs in a second on V1 and in ten under the interpreter on V2; ``test_exact.py`` is the thorough one.
"""

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support import random_heads as tiny_heads
from tests.support.dialects import edit
from tests.support.engines import Engine, Request, Settings, engine
from tests.support.random_heads import prompt
from tests.support.recorder import record, serve_exactly
from tests.support.reference import Reference

pytestmark = [pytest.mark.arm("plugin-v1", "plugin-v2"), pytest.mark.kernels]

K = 4
MAX_MODEL_LEN = 96


def start(pair: tuple[Path, Path], k: int = K, **changes: Any) -> Engine:
    return engine(Settings(*pair, k=k, max_model_len=MAX_MODEL_LEN, **changes))


def test_decoding(pair: tuple[Path, Path]):
    """Prompts in one piece, then decode batches of two with some drafts refused."""
    requests = [Request("a", prompt(9), 24), Request("b", prompt(30, 1), 24)]
    report, _ = serve_exactly(start(pair), requests, Reference(*pair))
    assert len(report.rejections) > 2


def test_decoding_of_a_sharpened_head(tmp_path: Path):
    """Each draft is chosen among the head's best tokens, knowing the one before it."""
    pair = tiny_heads.write_pair(tmp_path, tiny_heads.HeadSpec(draft_vocab=200, selector=True))
    requests = [Request("a", prompt(9), 16), Request("b", prompt(30, 1), 16)]
    report, _ = serve_exactly(start(pair), requests, Reference(*pair))
    assert report.rows > 10


def test_drafts_looked_up(pair: tuple[Path, Path]):
    """Texts that repeat themselves: in chunks, with a prefix that another has computed, in a finished one's place."""
    reference = Reference(*pair)
    known = [tuple(reference.greedy(prompt(9, i), size)) for i, size in enumerate((60, 30, 30))]  # b has cached blocks
    requests = [Request("a", known[0], 20), Request("b", known[0], 20, arrives=6), Request("c", known[1], 12)]
    requests += [Request(f"d{i}", known[2][: 30 + i], 12, arrives=16) for i in range(2)]
    live = start(pair, lookup=1, token_budget=30, prefix_caching=True)
    report, _ = serve_exactly(live, requests, reference, num_right=0)
    assert min(report.looked_up, report.rows - report.looked_up) > 10


@pytest.mark.arm("plugin-v1")
def test_every_kernel_runs_before_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM's dummy runs leave out what builds a draft batch and chooses drafts: a GPU compiled it for a request."""
    from peagle_vllm.sampling import selection
    from peagle_vllm.v1 import proposer

    kernels = Mock()
    for name in ("prepare_inputs", "gather_hidden", "lookup_drafts", "select_candidates"):
        module = selection if name == "select_candidates" else proposer
        kernels.attach_mock(Mock(wraps=getattr(module, name)), name)
        monkeypatch.setattr(module, name, getattr(kernels, name))
    pair = tiny_heads.write_pair(tmp_path, tiny_heads.HeadSpec(selector=True))
    live = start(pair, lookup=1, speculative=(("draft_sample_method", "probabilistic"),))
    for _ in range(2):
        live.runner._dummy_run(4)  # as vLLM's GPU worker does before it serves
    called = [call[0] for call in kernels.mock_calls]
    assert called == ["prepare_inputs", "gather_hidden", "select_candidates", "lookup_drafts", "lookup_drafts"]
    # Logits of the largest batch are for the profile run; when graphs are captured, vLLM would count them again.
    monkeypatch.setattr(live.drafter, "_profile_sampling", Mock(side_effect=AssertionError))
    live.drafter.dummy_run(live.drafter.max_num_tokens)


def test_every_draft_accepted(pair: tuple[Path, Path]):
    """The longest windows: K + 1 valid rows and K - 1 mask rows."""
    requests = [Request("a", prompt(9), 60), Request("b", prompt(20, 1), 60)]
    report, _ = serve_exactly(start(pair), requests, Reference(*pair), num_right=K)
    assert set(report.rejections) <= {0, K}  # K: planted past the end of what is known


def test_chunked_prefill_beside_decoding(pair: tuple[Path, Path]):
    """Chunks that are not the last take the next prompt token, and decoding goes on beside them."""
    requests = [Request("a", prompt(5), 30), Request("chunked", prompt(70, 1), 20, arrives=2)]
    report, _ = serve_exactly(start(pair, token_budget=12), requests, Reference(*pair))
    assert report.dropped["partial prefill"] > 4


def test_next_to_max_model_len(tmp_path: Path):
    """Some requests reach the end of their sequence; the other must not notice, and their last drafts are right.

    The head says that it has fewer positions, of a kind that scales nothing, and that vLLM 0.33 does not lengthen.
    """
    pair = tiny_heads.write_pair(tmp_path)
    reference, rope = Reference(*pair), {"rope_type": "dynamic", "factor": 2.0}
    fewer = {"max_position_embeddings": MAX_MODEL_LEN // 2, "rope_parameters": rope}
    edit(pair[1], lambda head: head.layer_config.update(fewer))
    requests = [Request(f"end{n}", prompt(MAX_MODEL_LEN - n, n), n) for n in (14, 11, 8)]
    requests.append(Request("other", prompt(20, 1), 12))
    # One token a step: every position is drafted at.
    report, _ = serve_exactly(start(pair, k=8), requests, reference, num_right=0)
    assert report.near_end > 12


def test_attention_builders_have_the_heads_sizes(pair: tuple[Path, Path]):
    """Scratch as narrow as the target's heads is written past its end. Block tables are as wide as the target's."""
    drafter = start(pair, speculative=(("max_model_len", MAX_MODEL_LEN // 2),)).drafter
    for group in getattr(drafter, "draft_attn_groups", None) or itertools.chain(*drafter.attn_groups):
        config = group.get_metadata_builder().vllm_config.model_config
        assert (config.model, config.max_model_len) == (str(pair[1]), MAX_MODEL_LEN)


@pytest.mark.arm("plugin-v1")
def test_positions_of_an_image(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    """M-RoPE's stand still in it; the drafter's KV and positions follow the tokens all the same, as on V2."""
    live = start(pair)
    inputs = live.drafter.set_inputs_first_pass

    def with_an_image(target_positions: Any, **given: Any) -> Any:
        return inputs(target_positions=target_positions.clamp(max=7).expand(3, -1), **given)

    monkeypatch.setattr(live.drafter, "set_inputs_first_pass", with_an_image)
    report, _ = serve_exactly(live, [Request("a", prompt(9), 24), Request("b", prompt(30, 1), 24)], Reference(*pair))
    assert len(report.rejections) > 2


def test_fewer_drafts_some_steps(pair: tuple[Path, Path]):
    """Dynamic K: two of four drafts where two requests run, none where three do; nobody's KV may miss a row."""
    schedule = [(1, 1, K), (2, 2, K // 2), (3, 4, 0)]
    live = start(pair, speculative=(("num_speculative_tokens_per_batch_size", schedule),))
    later = [Request("b", prompt(30, 1), 18, arrives=3), Request("c", prompt(12, 2), 6, arrives=6)]
    _, noted = serve_exactly(live, [Request("a", prompt(9), 30), *later], Reference(*pair))
    assert {len(row.draft) for row in noted.rows} == {0, K // 2, K}


def test_seeded_probabilistic_drafts_belong_to_their_request(pair: tuple[Path, Path]):
    """A seeded request draws the same drafts alone and beside others, whose seeds differ."""
    live = start(pair, speculative=(("draft_sample_method", "probabilistic"),))

    def request(name: str, seed: int) -> Request:
        return Request(name, prompt(20, seed), 8, sampling=(("temperature", 1.0), ("seed", seed)))

    def drafts(name: str, requests: list[Request]) -> list[tuple]:
        with record(live) as noted:
            live.run(requests)
        return [(row.p_last, row.bonus, row.draft) for row in noted.rows if row.req == name]

    alone = drafts("a", [request("a", 7)])
    beside = drafts("a", [request("x", 8), request("a", 7), request("y", 9)])
    # vLLM 0.33 drafts nothing where every request is about to end: alone sooner than beside others.
    both = [(row, other) for row, other in zip(alone, beside, strict=True) if row[2] and other[2]]
    assert both and all(row == other for row, other in both)
    assert len({draft for _, _, draft in alone}) > 1
