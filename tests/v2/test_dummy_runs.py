"""vLLM's profile and dummy runs: the target's batch is whole, the drafter's is as large as a real step's can be."""

import copy
import itertools
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.engines import Engine, Settings, engine

pytestmark = pytest.mark.arm("plugin-v2")

K, SEQS = 5, 8
BUDGET = 124


def start(pair: tuple[Path, Path]) -> Engine:
    budget = BUDGET - (K - 1) * SEQS  # which Settings puts on top
    return engine(Settings(*pair, k=K, max_num_seqs=SEQS, token_budget=budget))


@pytest.mark.parametrize(
    ("seqs", "budget", "k"), list(itertools.product([1, 8, 256, 1024], [64, 8192, 16_384], [1, 7, 8, 10]))
)
def test_a_profile_run_is_as_large_as_the_largest_step(seqs: int, budget: int, k: int, pair):
    """The scheduler runs up to ``budget - (K-1)`` rows of the target: K-1 for the one request that has them all."""
    live = start(pair)
    from peagle_vllm.v2.cudagraph import NO_GRAPHS
    from peagle_vllm.v2.speculator import ParallelEagleSpeculator

    config = copy.copy(live.drafter.vllm_config)
    config.scheduler_config, config.speculative_config = map(
        copy.copy, (config.scheduler_config, config.speculative_config)
    )
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
    live.runner._dummy_run(BUDGET)  # with attention, as vLLM's warm-up of kernels has it
    assert [call.args[0].total_num_scheduled_tokens for call in target.call_args_list] == [BUDGET] * 2
    assert [call.kwargs["num_tokens"] for call in drafter.call_args_list] == [BUDGET] * 2
