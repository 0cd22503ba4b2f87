"""Defects of stock V1, each reproduced, and what the plugin does.

Every test states a fact of stock vLLM and the opposite of the plugin on the same runner, so it runs for both.
A vLLM in which a stock line fails has fixed the defect.
"""

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.conftest import ARM
from tests.support.engines import Engine, Request, Settings, engine, shut_down
from tests.support.random_heads import prompt
from tests.support.recorder import compare, record
from tests.support.reference import Reference

pytestmark = pytest.mark.arm("stock-v1", "plugin-v1")

STOCK = ARM == "stock-v1"
MAX_MODEL_LEN = 160
K = 4


def start(pair: tuple[Path, Path], **changes: Any) -> Engine:
    return engine(Settings(*pair, k=K, max_model_len=MAX_MODEL_LEN, **changes))


def drafts_are_exact(live: Engine, pair: tuple[Path, Path], requests: list[Request]) -> bool:
    with record(live) as noted:
        finished = live.run(requests)
    try:
        print(compare(noted, finished, Reference(*pair), live.settings))
    except AssertionError as error:
        print(error)
        return False
    return True


def test_without_a_defect_drafts_are_exact(pair: tuple[Path, Path]):
    """The control: same engine, same comparison, nothing that a defect touches."""
    assert drafts_are_exact(start(pair), pair, [Request("a", prompt(70), 30), Request("b", prompt(9, 1), 30)])


def test_one_request_near_max_model_len_stops_all_drafts(pair: tuple[Path, Path]):
    """Stock drafts for nobody in such a step, and leaves a hole in every other request's draft KV."""
    live = start(pair)
    near = Request("near", prompt(MAX_MODEL_LEN - 6, 2), 6)
    other = Request("other", prompt(20, 3), 40)
    assert drafts_are_exact(live, pair, [near, other]) is not STOCK


def test_length_bound_is_stale_after_queries_are_extended(pair: tuple[Path, Path]):
    """Stock's extend_all_queries_by_N lengthens seq_lens, not the host's upper bound on them."""
    live = start(pair)
    original, bounds = live.drafter.build_per_group_and_layer_attn_metadata, []

    def build(metadata: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = metadata.seq_lens
        bounds.append(
            bool((metadata.seq_lens_cpu_upper_bound >= lengths).all() and metadata.max_seq_len >= lengths.max())
        )
        return original(metadata, *args, **kwargs)

    with patch.object(live.drafter, "build_per_group_and_layer_attn_metadata", build):
        live.run([Request("a", prompt(20), 20), Request("b", prompt(30, 1), 20)])
    assert bounds
    assert all(bounds) is not STOCK


def test_penalties_end_the_engine_near_max_model_len(pair: tuple[Path, Path]):
    """Once a request with penalties has come, stock's length of every other one counts drafts that were rejected."""
    live = start(pair)
    near = Request("near", prompt(MAX_MODEL_LEN - 20, 2), 20)
    ends = pytest.raises((AssertionError, ValueError), match=r"could not broadcast|max model length")
    with ends if STOCK else nullcontext():
        live.run([near, Request("penalties", prompt(20, 3), 20, arrives=8, sampling=(("presence_penalty", 0.5),))])
    shut_down()  # an engine that raised is not used again


def test_prompt_token_slip_in_chunked_prefill(pair: tuple[Path, Path]):
    """Stock feeds the LAST prompt token after a chunk that is not the last; the drafter's KV keeps the error."""
    live = start(pair, token_budget=32)
    assert drafts_are_exact(live, pair, [Request("chunked", prompt(100), 30)]) is not STOCK


def test_a_request_that_misses_a_step_verifies_placeholders(pair: tuple[Path, Path]):
    """The budget is two requests' until one of them ends. Stock has lost the third's drafts by then."""
    live = start(pair, token_budget=5)
    sampler = live.runner.rejection_sampler
    with patch.object(sampler, "forward", wraps=sampler.forward) as forward:
        live.run([Request(str(i), prompt(2, i), 12) for i in range(3)])
    verified = torch.cat([call.args[0].draft_token_ids for call in forward.call_args_list]).tolist()
    assert len(verified) > K and (min(verified) < 0) is STOCK


def test_dynamic_k_gives_drafts_to_the_wrong_request(pair: tuple[Path, Path]):
    """Stock drafts K for each request and cuts the result into rows of the smaller K."""
    schedule = [(1, 1, K), (2, 4, K // 2)]
    live = start(pair, speculative=(("num_speculative_tokens_per_batch_size", schedule),))
    original, shapes = live.drafter.propose, []

    def propose(*args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = original(*args, **kwargs)
        shapes.append((kwargs["common_attn_metadata"].batch_size(), kwargs["num_speculative_tokens"], drafts.shape))
        return drafts

    # Stock may also die of the shape further on.
    with patch.object(live.drafter, "propose", propose), suppress(Exception) if STOCK else nullcontext():
        live.run([Request("a", prompt(20), 20), Request("b", prompt(30, 1), 20)])
    fitting = all(tuple(shape) == (num_reqs, k) for num_reqs, k, shape in shapes)
    assert any(k < K for _, k, _ in shapes)
    assert fitting is not STOCK


def test_seeds_are_ignored_in_probabilistic_drafts(pair: tuple[Path, Path]):
    """A seeded request does not repeat its drafts on stock: they are drawn from the global generator."""
    live = start(pair, speculative=(("draft_sample_method", "probabilistic"),))
    sampling = (("temperature", 1.0), ("seed", 7))

    def first_drafts(name: str) -> list[tuple[int, ...]]:
        with record(live) as noted:
            live.run([Request(name, prompt(20), 2, sampling=sampling)])
        return [row.draft for row in noted.rows]

    once, twice = first_drafts("once"), first_drafts("twice")
    assert (once[0] == twice[0]) is not STOCK


def test_top_k_alone_ends_the_engine_where_no_draft_is_verified(pair: tuple[Path, Path]):
    """The largest top-k of no rows: vLLM's CPU build raises at the prompt, and with any batch that has no drafts."""
    live = start(pair)
    with pytest.raises(RuntimeError, match=r"numel\(\) == 0") if STOCK else nullcontext():
        finished = live.run([Request("a", prompt(20), 12, sampling=(("temperature", 1.0), ("top_k", 5)))])
        assert len(finished["a"].output) == 12
    shut_down()  # an engine that raised is not used again
