"""Which tokens are kept: counted once, special ones always, and as many as pay."""

import pytest
import torch

from peagle_tools.sharpen import vocabulary
from peagle_tools.sharpen.trace import CandidateTrace
from tests.support.random_heads import EXPERTS, EXPERTS_PER_TOKEN, write_target


def trace(ids, tokens):
    """Drafts with these candidates [N, K, M] (draft ids) beside the target's tokens [N, K + 1]."""
    ids, tokens = torch.tensor(ids, dtype=torch.int32), torch.tensor(tokens, dtype=torch.int32)
    num, num_k, _ = ids.shape
    return CandidateTrace(ids, torch.zeros(ids.shape), torch.zeros(num, num_k, 1), tokens, torch.arange(num))


def test_each_token_counts_once():
    """An answer 5 6 7 8 9, then its end: the first draft gets one token right, so the next begins at 7."""
    seen = trace(
        [[[6], [3], [3]], [[8], [9], [3]]],
        [[5, 6, 7, 8], [7, 8, 9, -1]],
    )
    counts = vocabulary.count_tokens(seen, torch.arange(10), 10)
    assert counts.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_each_token_of_a_given_answer_counts_once():
    """An answer 5 6 7 8 9, read two tokens a step, whatever the drafts got right."""
    seen = trace(
        [[[6], [7], [8]], [[3], [9], [3]], [[3], [3], [3]]],
        [[5, 6, 7, 8], [7, 8, 9, -1], [9, -1, -1, -1]],
    )
    assert vocabulary.count_tokens(seen, torch.arange(10), 10, 2).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_special_tokens_come_first_then_the_most_said():
    counts = torch.tensor([0, 9, 4, 4, 7, 0])
    ids = torch.tensor([1, 2, 3, 4, 5])  # what a reduced head drafts: not token 0
    order = vocabulary.ranked(counts, ids, {0, 5})
    assert ids[order].tolist() == [5, 1, 4, 2, 3]


@pytest.fixture
def costly():
    """1,000 drafts of 256 tokens; the right one is among the first 128 in nine of ten, and else a rare one."""
    gen = torch.Generator().manual_seed(0)
    truth = torch.randint(0, 128, (1000, 2), generator=gen)
    rare = torch.rand(1000, 2, generator=gen) < 0.1
    truth[rare] = 128 + torch.randint(0, 128, (int(rare.sum()),), generator=gen)
    candidates = torch.stack([truth, (truth + 1) % 128], -1)
    return trace(candidates.tolist(), [[0, *tokens] for tokens in truth.tolist()])


@pytest.mark.parametrize(
    ("rest", "size"),
    [(10**9, 256), (100, 128)],  # the target is all that costs; the output matrix is
)
def test_the_size_that_pays(costly, rest, size):
    ids = torch.arange(256)
    assert vocabulary.best_size(ids, ids, costly, 0, lambda num: rest + num) == size


def test_a_dropped_candidate_gives_way_to_the_next():
    """64 tokens drop the wrong best one, so the right second is drafted; 128 keep it."""
    ids = torch.arange(128)
    one = trace([[[100, 2]]] * 4, [[0, 2]] * 4)
    assert vocabulary.best_size(ids, ids, one, 0, lambda num: 1.0) == 64


def test_targets_read_all_but_their_embedding(tmp_path):
    folder = write_target(tmp_path / "dense")
    held = {n: i.num_bytes for n, i in vocabulary.read_headers(folder).items()}
    assert vocabulary.target_bytes(str(folder), 4) == sum(held.values()) - held["model.embed_tokens.weight"]


def test_targets_read_the_experts_that_are_chosen(tmp_path):
    folder = write_target(tmp_path / "moe", "qwen3_moe")
    held = {n: i.num_bytes for n, i in vocabulary.read_headers(folder).items()}
    experts = sum(size for name, size in held.items() if ".experts." in name)
    others = sum(held.values()) - experts - held["model.embed_tokens.weight"]
    for rows in (1, 4):
        share = 1 - (1 - EXPERTS_PER_TOKEN / EXPERTS) ** rows
        assert vocabulary.target_bytes(str(folder), rows) == pytest.approx(others + experts * share)
