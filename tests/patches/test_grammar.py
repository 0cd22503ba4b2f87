"""What Model Runner V2 verifies of drafts that a grammar forbids."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from peagle_vllm.patches import v2_speculator


def test_a_drawn_draft_that_the_grammar_forbids_is_verified(monkeypatch: pytest.MonkeyPatch):
    """The first one, on its row of the bitmask, which is the grammar's; those after it are not."""
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.worker.gpu.structured_outputs import grammar_invalid_drafts

    position, ends = torch.arange(4), torch.tensor([0, 4])
    num = {"num_reqs": 1, "num_draft_tokens": 3, "num_draft_tokens_per_req": np.array([3])}
    batch = SimpleNamespace(req_ids=["a"], expanded_local_pos=position, cu_num_logits=ends, **num)
    monkeypatch.setattr(v2_speculator, "is_peagle", lambda _: True)

    def invalid(_runner, _hidden, batch, grammar):
        return grammar_invalid_drafts(batch, grammar.structured_output_request_ids, grammar.num_acceptable_drafts)

    for draft_logits, first_invalid in ((None, 2), (position, 3)):
        runner = SimpleNamespace(vllm_config=None, speculator=SimpleNamespace(draft_logits=draft_logits))
        grammar = GrammarOutput(["a"], np.zeros((4, 1), np.int32), [1])
        assert torch.equal(v2_speculator.sample(invalid, runner, None, batch, grammar), position >= first_invalid)
