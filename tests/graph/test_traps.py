"""What can go wrong between a draft batch and a CUDA graph, one test each; docs/draft-step.md has the list."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import tiny_heads
from tests.drafts.graphs import emulate
from tests.drafts.recorder import compare, planter, record
from tests.drafts.reference import Reference
from tests.engines import Engine, Request, Settings, engine
from tests.tiny_heads import prompt

pytestmark = pytest.mark.arm("plugin-v2")

K, MAX_MODEL_LEN, BUDGET, SEQS = 3, 96, 64, 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny_heads.write_target(folder / "target")
    return target, tiny_heads.write_head(folder / "head", target, tiny_heads.HeadSpec())


def start(pair: tuple[Path, Path], **changes: Any) -> Engine:
    return engine(Settings(*pair, k=K, max_model_len=MAX_MODEL_LEN, token_budget=BUDGET, **changes))


def test_trap_3_batches_beyond_the_token_budget_run_uncompiled(pair, monkeypatch: pytest.MonkeyPatch):
    """vLLM's warm-up ignores the draft slots, and compiled heads assert rows <= max_num_batched_tokens."""
    live, contexts = start(pair), []
    from peagle_kernels import Layout
    from peagle_vllm.v2 import speculator

    original = speculator.set_forward_context

    def noting(*args: Any, **kwargs: Any) -> Any:
        contexts.append(kwargs["skip_compiled"])
        return original(*args, **kwargs)

    monkeypatch.setattr(speculator, "set_forward_context", noting)
    drafter = live.drafter
    assert drafter.max_draft_rows > drafter.max_num_tokens
    for rows in (drafter.max_num_tokens, drafter.max_num_tokens + 1):
        with torch.inference_mode():
            drafter._forward(speculator.DraftBatch(Layout(rows, 1), 0, drafter.staging, None, None))
    assert contexts == [False, True]


def test_trap_4_slots_are_not_the_targets(pair):
    """BlockTables.slot_mappings is shared with the target's graph and too narrow for a draft batch."""
    drafter = start(pair).drafter
    own, shared = drafter.buffers.slot_mappings, drafter.block_tables.slot_mappings
    assert own.untyped_storage().data_ptr() != shared.untyped_storage().data_ptr()
    assert own.shape[1] == drafter.max_num_tokens + SEQS * (K - 1) > shared.shape[1]


def test_trap_7_m_follows_the_weights_inside_the_graph(pair):
    """A reload writes weights in place; a graph that kept m would draft with the old one."""
    live = start(pair)
    mask_hidden = live.drafter.model.mask_hidden
    kept = mask_hidden.clone()
    with emulate(live, [1, 2, 4]) as seen, torch.inference_mode():
        mask_hidden.mul_(-3)
        try:
            live.run([Request("reloaded", prompt(9), 8)])
            m = live.drafter.model.combine_hidden_states(mask_hidden.view(1, -1))[0]
        finally:
            mask_hidden.copy_(kept)
        rows = live.drafter.buffers.row_map[: 2 * K] == -1
        assert seen.replayed and rows.sum() == K - 1
        torch.testing.assert_close(live.drafter.hidden_states[: 2 * K][rows], m.expand(K - 1, -1))


def test_trap_9_max_model_len_is_read_when_a_step_is_drafted(pair, monkeypatch: pytest.MonkeyPatch):
    """vLLM shrinks it to what fits in memory, after the speculator is built."""
    live = start(pair)
    monkeypatch.setattr(live.drafter.vllm_config.model_config, "max_model_len", 40)
    assert live.drafter._max_len == 40
    live.run([Request("shrunk", prompt(30), 10)])
    assert live.drafter.buffers.seq_lens[0] <= 40


def test_trap_12_another_ranks_larger_batch_pads_this_ones_rows(pair, monkeypatch: pytest.MonkeyPatch):
    """Data parallel ranks agree on a number of rows; an expert layer would wait for the missing ones."""
    live, reference = start(pair), Reference(*pair)
    from peagle_vllm.v2 import speculator

    original, asked = speculator.dispatch_cg_and_sync_dp, []

    def agreed(manager: Any, num_reqs: int, num_tokens: int, uniform_token_count: int | None, **rest: Any) -> Any:
        asked.append(uniform_token_count)
        desc, sync = original(manager, num_reqs, num_tokens, uniform_token_count=uniform_token_count, **rest)
        return replace(desc, num_tokens=desc.num_tokens + 7), sync

    monkeypatch.setattr(speculator, "dispatch_cg_and_sync_dp", agreed)
    with record(live) as noted:
        finished = live.run([Request("rank", prompt(20), 8), Request("other", prompt(5, 1), 8)])
    print(compare(noted, finished, reference, k=K, max_model_len=MAX_MODEL_LEN))
    assert set(asked) == {None, 2 * K}  # ragged and static: ranks that differ in it all draft eagerly


def test_trap_12_windowed_drafters_have_no_ahead_of_time_schedule(pair):
    """FlashAttention's schedule is made for the whole sequence; vLLM's DFlash turns it off too."""
    start(pair)  # the interpreter must be there before vLLM is imported
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from peagle_vllm.v2.speculator import ParallelEagleSpeculator

    common = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
    windowed, full = (
        SimpleNamespace(kv_cache_spec=spec, aot_schedule=True)
        for spec in (SlidingWindowSpec(**common, sliding_window=64), FullAttentionSpec(**common))
    )
    groups = [[SimpleNamespace(get_metadata_builder=lambda builder=builder: builder)] for builder in (windowed, full)]
    ParallelEagleSpeculator._turn_off_windowed_schedules(SimpleNamespace(attn_groups=groups))
    assert (windowed.aot_schedule, full.aot_schedule) == (False, True)


def test_trap_13_capture_leaves_live_requests_alone(pair):
    """Sampling rows are inert and no KV is written while shapes are captured."""
    live = start(pair)
    caches = [cache for cache in live.runner.kv_caches if isinstance(cache, torch.Tensor)]
    assert caches
    for cache in caches:
        cache.fill_(7)
    with emulate(live, [1, 2, 4]) as seen:
        assert seen.captured
        assert all((cache == 7).all() for cache in caches)
        assert (live.drafter.buffers.sample_req == -1).all()


def test_trap_16_a_graph_draws_what_the_eager_step_draws(pair):
    """Gumbel seeds mix position and draft column in: a replayed step must pass the same ones."""
    live = start(pair, speculative=(("draft_sample_method", "probabilistic"),))
    sampling = (("temperature", 1.0), ("seed", 11))

    def drafts(name: str) -> list[tuple[int, ...]]:
        right = {f"{name}.{i}": list(prompt(90, i)) for i in range(3)}
        asked = [
            Request(req, tuple(tokens[: 9 + i]), 20, sampling=sampling) for i, (req, tokens) in enumerate(right.items())
        ]
        with record(live, planter(right, tiny_heads.VOCAB, num_right=1)) as noted:
            live.run(asked)
        return sorted((row.req.removeprefix(name), row.p_last, row.draft) for row in noted.rows)

    eager = drafts("eager")
    with emulate(live, [1, 2, 4]) as seen:
        replayed = drafts("graph")
    assert seen.padded > 0
    assert replayed == eager
