"""What can go wrong between a draft batch and a CUDA graph, one test each; docs/architecture.md has the list."""

import copy
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from tests.support import random_heads as tiny_heads
from tests.support.engines import Engine, Request, Settings, engine
from tests.support.graphs import emulate, start_over
from tests.support.random_heads import prompt
from tests.support.recorder import planter, record

pytestmark = pytest.mark.arm("plugin-v2")

K, MAX_MODEL_LEN = 3, 96
BUDGET, SEQS = 64, 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_heads.write_pair(tmp_path_factory.mktemp("tiny"), tiny_heads.HeadSpec(selector=True))


def start(pair: tuple[Path, Path], **changes: Any) -> Engine:
    return engine(Settings(*pair, k=K, max_model_len=MAX_MODEL_LEN, token_budget=BUDGET, **changes))


def test_under_decode_context_parallelism_the_drafters_kv_cache_is_whole(pair, monkeypatch: pytest.MonkeyPatch):
    """No backend of the CPU build has context parallelism; this is what vLLM's runner makes of the speculator's."""
    live = start(pair)
    from peagle_vllm.v2.speculator import ParallelEagleSpeculator

    config = copy.copy(live.drafter.vllm_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.decode_context_parallel_size = 2
    drafter = ParallelEagleSpeculator(config, live.drafter.device, live.runner.req_states)
    drafter.draft_attn_layer_names = live.drafter.draft_attn_layer_names
    monkeypatch.setattr(live.runner, "speculator", drafter)
    monkeypatch.setattr(live.runner, "dcp_size", 2)
    specs = live.runner.get_kv_cache_spec()
    assert {name for name, spec in specs.items() if not spec.dcp_sharded} == drafter.draft_attn_layer_names


@pytest.mark.parametrize(("seqs", "budget", "k"), product([1, 8, 256, 1024], [64, 8192, 16_384], [1, 7, 8, 10]))
def test_a_profile_run_is_as_large_as_the_largest_step(seqs: int, budget: int, k: int, pair):
    """The scheduler runs up to ``budget - (K-1)`` rows of the target: K-1 for the one request that has them all."""
    live = start(pair)
    from peagle_vllm.v2.cudagraph import NO_GRAPHS
    from peagle_vllm.v2.speculator import ParallelEagleSpeculator

    config = copy.copy(live.drafter.vllm_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.speculative_config = copy.copy(config.speculative_config)
    config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens = seqs, budget
    config.speculative_config.num_speculative_tokens = k
    drafter = ParallelEagleSpeculator(config, live.drafter.device, live.runner.req_states)
    runner = copy.copy(live.runner)
    runner.speculator, runner.decode_query_len = drafter, k + 1
    runner.max_num_reqs, runner.max_num_tokens = seqs, budget
    runner.execute_model = Mock(side_effect=InterruptedError)  # the batch is scheduled
    with pytest.raises(InterruptedError):
        runner._dummy_run(budget, skip_attn=True, is_profile=True)
    rows = list(runner.execute_model.call_args.args[0].num_scheduled_tokens.values())
    assert sum(rows) >= budget - (k - 1)
    assert len(rows) == min(seqs, budget // k)

    limits = {"max_k": k, "max_num_tokens": budget, "max_model_len": budget}
    batch, starts, _ = NO_GRAPHS.dispatch(np.array(rows, dtype=np.int32), sum(rows), k, **limits)
    assert batch.num_rows == starts[-1] == budget
    assert np.diff(starts).min() >= k
    # vLLM's warm-up of kernels is no dummy run: as many requests as fit, K + 2 tokens each.
    warm_up = np.full(min(seqs, budget // (k + 2)), k + 2, dtype=np.int32)
    batch, starts, _ = NO_GRAPHS.dispatch(warm_up, int(warm_up.sum()), k, **limits)
    assert batch.num_rows == starts[-1] <= budget
    assert k <= np.diff(starts).min() <= np.diff(starts).max() <= 2 * k + 1


def test_the_profile_run_compiles_the_drafter(pair, monkeypatch: pytest.MonkeyPatch):
    """On the live engine: uncompiled there, vLLM would compile and capture in the next run, whose memory it drops."""
    live = start(pair)
    from peagle_vllm.v2 import speculator

    drafter, target = Mock(wraps=speculator.set_forward_context), Mock(wraps=live.runner.execute_model)
    monkeypatch.setattr(speculator, "set_forward_context", drafter)
    monkeypatch.setattr(live.runner, "execute_model", target)
    live.runner.profile_run()
    budget = live.drafter.max_num_tokens
    live.runner._dummy_run(budget)  # with attention, as vLLM's warm-up of kernels has it
    assert [call.args[0].total_num_scheduled_tokens for call in target.call_args_list] == [budget] * 2
    assert [call.kwargs["num_tokens"] for call in drafter.call_args_list] == [budget] * 2


def test_max_model_len_is_read_when_a_step_is_drafted(pair, monkeypatch: pytest.MonkeyPatch):
    """vLLM shrinks it to what fits in memory, after the speculator is built."""
    live = start(pair)
    live.run([Request("before", prompt(30), 1)])  # vLLM's front end keeps the length that it finds then
    monkeypatch.setattr(live.drafter.vllm_config.model_config, "max_model_len", 40)
    assert live.drafter._max_len == 40
    live.run([Request("shrunk", prompt(30), 10)])
    assert live.drafter.buffers.seq_lens[0] <= 40


def test_what_flash_attention_3_plans_suits_the_drafter(pair):
    """Its ahead-of-time schedule is made for the whole sequence, so a windowed drafter has none, as vLLM's DFlash.

    Split-KV buffers grow up to 512 rows. Above them the builder leaves the number of splits open: fewer, in a graph.
    """
    start(pair)  # the interpreter must be there before vLLM is imported
    from peagle_vllm.v2 import attention

    layers = {"first": SimpleNamespace(sliding_window=None), "second": SimpleNamespace(sliding_window=None)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    sizes = {"max_cudagraph_size": 4096, "max_num_splits": 32}
    builder = SimpleNamespace(aot_schedule=True, vllm_config=config, layer_names=list(layers), **sizes)
    attention._adapt_flash_attention(builder)
    assert builder.aot_schedule and builder.max_cudagraph_size == attention.MAX_SPLIT_KV_ROWS
    layers["second"].sliding_window = 64
    attention._adapt_flash_attention(builder)
    assert not builder.aot_schedule
    group = SimpleNamespace(layer_names=["layer"], get_metadata_builder=lambda: builder)
    for built, rows, kept in ((0, 513, 31), (0, 1024, 16), (0, 16_385, 1), (0, 32_768, 1), (32, 512, 32), (1, 64, 1)):
        metadata = {"layer": SimpleNamespace(max_num_splits=built, num_actual_tokens=rows)}
        attention._fix_num_splits([group], metadata)
        assert metadata["layer"].max_num_splits == kept


def test_the_drafter_reads_blocks_as_small_as_the_targets_backend_has_them(pair):
    """The runner splits a KV cache group's blocks for all its layers; the head's backend alone would not."""
    live = start(pair)
    drafter = live.drafter
    groups, ours = chain(*drafter.target_attn_groups), drafter.draft_attn_layer_names
    (theirs,) = (group for group in groups if ours.intersection(group.layer_names))
    size = theirs.kv_cache_spec.block_size // 2
    halves = patch.object(theirs.backend, "get_supported_kernel_block_sizes", lambda _=None: [size, 2 * size])
    with halves, patch.object(theirs, "kernel_block_size", size):
        start_over(drafter, drafter.vllm_config)
        (group,) = chain(*drafter.attn_groups)
        table = group.map_to_kernel_block_table(torch.tensor([[5, 3]], dtype=torch.int32))
    start_over(drafter, drafter.vllm_config)
    assert group.get_metadata_builder().kv_cache_spec.block_size == size
    assert table.tolist() == [[10, 11, 6, 7]]


def test_the_drafter_uses_the_targets_scratch_buffer(pair):
    """FlashInfer's. A smaller one would not do; a backend, or a composite, without one is left alone."""
    start(pair)
    from peagle_vllm.v2 import attention

    def builder(size: int) -> Any:
        stub = SimpleNamespace(scratch=torch.empty(size), _get_workspace_buffer=lambda: stub.scratch)
        stub.set_workspace_buffer = lambda scratch: setattr(stub, "scratch", scratch)
        return stub

    def groups(*builders: Any) -> list[list[Any]]:
        return [[], [SimpleNamespace(metadata_builders=[builder]) for builder in builders]]

    target, small, none = builder(8), builder(4), SimpleNamespace(_get_workspace_buffer=lambda: None)
    large = builder(16)
    workspace = large.scratch
    attention.share_workspace(groups(small, large, none, object()), groups(none, object(), target))
    assert small.scratch is target.scratch and large.scratch is workspace
    attention.share_workspace(groups(small), groups(object()))
    assert small.scratch is target.scratch


def test_memory_of_graphs_ends_with_the_largest_graph(pair):
    """Larger batches draft in memory that lives for a step; without graphs nothing is kept."""
    live = start(pair)
    assert len(live.drafter.hidden_states) == 0
    with emulate(live, [1, 2]) as seen:
        assert len(live.drafter.hidden_states) == max(*seen.sizes, *(n * length for n, length in seen.captured))
        assert len(live.drafter.fc_inputs) == 1 + (K + 1) * max(n for n, _ in seen.captured)
        live.run([Request("large", prompt(60), 4)])
        assert seen.eager == 1


def test_the_hosts_bound_on_lengths_holds_for_drafts(pair):
    live = start(pair)
    original, bounds = live.drafter.attention.metadata, []

    def metadata(num_reqs: int, *args: Any, seq_lens_bound: Any, **kwargs: Any) -> Any:
        bounds.append((torch.as_tensor(seq_lens_bound) >= live.drafter.buffers.seq_lens[:num_reqs]).all())
        return original(num_reqs, *args, seq_lens_bound=seq_lens_bound, **kwargs)

    with patch.object(live.drafter.attention, "metadata", metadata):
        live.run([Request("a", prompt(20), 20), Request("b", prompt(30, 1), 20)])
    assert bounds and all(bounds)


def test_capture_leaves_live_requests_alone(pair):
    """Sampling rows are inert and no KV is written while shapes are captured.

    Backends of a GPU are prepared for it, by what the tests above try.
    """
    live = start(pair)
    from peagle_vllm.v2 import attention, speculator

    caches = [cache for cache in live.runner.kv_caches if isinstance(cache, torch.Tensor)]
    assert caches
    for cache in caches:
        cache.fill_(7)
    adapt, fix, share = (
        patch.object(module, name, wraps=getattr(module, name))
        for module, name in (
            *((attention, name) for name in ("_adapt_flash_attention", "_fix_num_splits")),
            (speculator, "share_workspace"),
        )
    )
    with adapt as adapted, fix as fixed, share as shared, emulate(live, [1, 2, 4]) as seen:
        assert adapted.called and fixed.called and shared.called
        assert seen.captured
        assert all((cache == 7).all() for cache in caches)
        assert (live.drafter.buffers.sample_idx_mapping == -1).all()


def test_a_graph_draws_what_the_eager_step_draws(pair):
    """Gumbel seeds mix position and draft column in: a replayed step must pass the same ones."""
    live = start(pair, speculative=(("draft_sample_method", "probabilistic"),))
    sampling = (("temperature", 1.0), ("seed", 11))

    def drafts(name: str) -> list[tuple[int, ...]]:
        right = {f"{name}.{i}": list(prompt(90, i)) for i in range(3)}
        asked = [Request(req, tuple(ids[: 9 + i]), 20, sampling=sampling) for i, (req, ids) in enumerate(right.items())]
        with record(live, planter(right, tiny_heads.VOCAB, num_right=1)) as noted:
            live.run(asked)
        return sorted((row.req.removeprefix(name), row.p_last, row.draft) for row in noted.rows)

    eager = drafts("eager")
    with emulate(live, [1, 2, 4]) as seen:
        replayed = drafts("graph")
    assert seen.padded > 0
    assert replayed == eager


def test_another_mode_resolved_later_captures_what_the_buffers_hold(pair):
    """A backend without FULL graphs of mixed batches turns FULL into FULL_AND_PIECEWISE after buffers were made."""
    live = start(pair)
    from vllm.config.compilation import CUDAGraphMode

    with emulate(live, [1, 2], mode="FULL") as seen, torch.inference_mode():
        assert seen.sizes == []
        live.drafter.init_cudagraph_manager(CUDAGraphMode.FULL_AND_PIECEWISE)
        live.drafter.capture()
        assert 0 < max(seen.sizes) <= len(live.drafter.hidden_states)
        live.run([Request("resolved", prompt(12), 6)])
        assert seen.pieces.total() > 0


def test_adaptive_verification_reads_the_samples_of_a_step_that_wants_fewer_drafts(pair):
    """vLLM has it with FULL graphs only, so its estimator is put in by hand. It divides a sample's row by K."""
    with pytest.raises(ValueError, match="Adaptive verification requires full CUDA graphs"):
        start(pair, speculative=(("enable_adaptive_verification", True),))
    live = start(pair, speculative=(("num_speculative_tokens_per_batch_size", [(1, 1, K), (2, SEQS, K - 1)]),))
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    drafter, original = live.drafter, live.drafter.propose
    checked, rows = [], list[Any]()
    head, num_candidates = drafter.model, drafter.selector.num_candidates
    drafter.draft_token_confidence_probs = torch.zeros(drafter.max_num_reqs, K)

    def propose(batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts, wanted = original(batch, *args, **kwargs), kwargs["num_speculative_tokens"]
        if not wanted:
            return drafts
        by_batch = drafter.draft_token_confidence_probs[: batch.num_reqs, :wanted]
        by_request = drafter.acceptance_estimator.predictions[batch.idx_mapping, :wanted]
        torch.testing.assert_close(by_batch, by_request)
        # The selector's distribution over the whole vocabulary: it reranks its candidates, the others stay as they are.
        probs = head.logits_processor(head.lm_head, rows.pop().hidden_states.flatten(0, 1)).softmax(-1)
        of_candidates = probs.topk(num_candidates).values.sum(-1)
        ranked = drafter.scores.view(-1, num_candidates)[: len(probs)].softmax(-1)
        features = drafter.acceptance_estimator.features[batch.idx_mapping, :wanted].flatten()
        torch.testing.assert_close(features, torch.logit(of_candidates * ranked.amax(-1)))
        checked.append((batch.num_reqs, wanted))
        return drafts

    estimator = OnlineAcceptanceEstimator(drafter.max_num_reqs, K, drafter.device)
    with patch.multiple(drafter, propose=propose, observer=rows.append, acceptance_estimator=estimator):
        live.run([Request(f"adaptive.{i}", prompt(9 + i, i), 4 + 4 * i) for i in range(3)])
    assert (1, K) in checked and (3, K - 1) in checked
