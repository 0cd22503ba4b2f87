"""What Model Runner V2 verifies of drafts that a grammar refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from peagle_vllm.patches import capture_range, drafter_limit, head_weights, v2_speculator, weight_update

K = 3


@pytest.mark.parametrize(
    ("method", "refused", "acceptable", "first_invalid"),
    [
        ("probabilistic", {"a": 2}, 1, 3),
        ("probabilistic", {"a": 3}, 0, 2),
        ("probabilistic", {"b": 2}, 0, 1),  # nobody has looked at these drafts, whose rows forbid nothing
        ("greedy", {"a": 2}, 1, 2),
    ],
)
def test_a_drawn_draft_that_the_grammar_refuses_is_verified(
    method: str, refused: dict[str, int], acceptable: int, first_invalid: int, monkeypatch: pytest.MonkeyPatch
):
    """The first one, on its row of the bitmask; those after it are not."""
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.worker.gpu.structured_outputs import grammar_invalid_drafts

    monkeypatch.setattr(v2_speculator, "is_peagle", lambda _: True)
    config = SimpleNamespace(speculative_config=SimpleNamespace(draft_sample_method=method))
    scheduler, step = SimpleNamespace(vllm_config=config), SimpleNamespace(num_invalid_spec_tokens=refused)
    made = GrammarOutput(["a"], np.zeros((1 + K, 1), np.int32), [acceptable])
    grammar = v2_speculator.get_grammar_bitmask(lambda *_: made, scheduler, step)
    position, ends = torch.arange(1 + K), torch.tensor([0, 1 + K])
    num = {"num_reqs": 1, "num_draft_tokens": K, "num_draft_tokens_per_req": np.array([K])}
    batch = SimpleNamespace(req_ids=["a"], expanded_local_pos=position, cu_num_logits=ends, **num)
    invalid = grammar_invalid_drafts(batch, grammar.structured_output_request_ids, grammar.num_acceptable_drafts)
    expected = position >= first_invalid
    assert torch.equal(invalid, expected) if invalid is not None else not expected.any()


def test_what_is_no_p_eagle_needs_no_name_that_a_later_vllm_has_changed():
    wrappers = capture_range._set_cudagraph_sizes, capture_range.initialize_cudagraph_keys, head_weights.load_weights
    wrappers += drafter_limit._input_fits_in_drafter, v2_speculator.get_grammar_bitmask, v2_speculator.load_model
    for wrapper in (*wrappers, weight_update._start_weight_update):
        config, calls = SimpleNamespace(speculative_config=None, compilation_config=None), []
        config.vllm_config = config
        wrapper(lambda *args, seen=calls: seen.append(args) or seen, config, "more")
        assert calls == [(config, "more")]
