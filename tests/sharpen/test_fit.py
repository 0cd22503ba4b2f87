"""What is fitted: traces, accepted drafts against a selection by hand, and what fitting gains."""

import pytest
import torch

from peagle_kernels.select_candidates import CandidateSelector
from peagle_tools.shared.errors import ToolError
from peagle_tools.sharpen import fit
from peagle_tools.sharpen.trace import UNKNOWN, CandidateTrace
from tests.sharpen.traces import VOCAB, accepted, random_selector, traced

K, M = 3, 4
ALL = torch.arange(VOCAB)  # target ids where every token can be drafted


def walk(trace: CandidateTrace, row: int, selector: CandidateSelector | None, target_ids: torch.Tensor) -> int:
    """How many tokens of a draft are accepted, position by position."""
    previous = int(trace.tokens[row, 0])
    for i in range(K):
        ids, scores = trace.ids[row, i].long(), trace.logits[row, i]
        if selector is not None:
            gated = selector.predecessor_codebook[previous] * (selector.hidden_projection @ trace.hidden[row, i])
            pairs = selector.successor_codebook[ids] @ gated
            scores = selector.unary_scale[i] * scores + selector.edge_scale[i] * pairs
        previous = int(target_ids[ids[scores.argmax()]])
        if previous != trace.tokens[row, i + 1]:
            return i
    return K


@pytest.mark.parametrize("factor", [1, 2])
def test_accepted_is_a_walk_by_hand(factor: int):
    """Also with a reduced vocabulary."""
    trace = traced(60)
    trace.tokens[:, 1:] *= factor
    trace.tokens[5:9, 2:] = UNKNOWN  # these answers end
    target_ids, selector = factor * ALL, random_selector(K, M)
    counts = [[walk(trace, row, which, target_ids) for row in range(60)] for which in (None, selector)]
    assert [accepted(trace, which, target_ids).tolist() for which in (None, selector)] == counts
    assert counts[0] != counts[1]


@pytest.mark.parametrize("num", [0, 8])
def test_too_few_drafts_are_one_line(num: int):
    """A target that ends every answer at once leaves none; 8 are of one prompt."""
    with pytest.raises(ToolError, match=rf"^{num} drafts in all of the target's answers; ask for longer ones"):
        traced(8).rows(torch.arange(num)).divided()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "LEARNING_RATE", 0.03)  # small tables and few steps


HELD, FRESH = traced(2_000, seed=2), traced(2_000, seed=3)  # what chooses, and what judges


def fitted(learned: CandidateTrace, held: CandidateTrace = HELD) -> CandidateSelector:
    return fit.fit(learned, held, VOCAB, ALL, 8)


def length(trace: CandidateTrace, selector: CandidateSelector | None, target_ids: torch.Tensor = ALL) -> float:
    return 1 + float(accepted(trace, selector, target_ids).float().mean())


def test_fitting_learns_what_follows_what():
    selector = fitted(traced(40_000, seed=1))
    assert length(FRESH, None) < 1.6
    assert length(FRESH, selector) > 3.0  # 1 + .95 + .95**2 + .95**3 = 3.71 is all there is
    assert selector.predecessor_codebook.dtype == torch.bfloat16


@pytest.mark.parametrize("num", [200, 20_000])
def test_where_nothing_can_be_learned_nothing_is_lost(num: int):
    held, fresh = (traced(size, chained=False, seed=size) for size in (2_000, 4_000))
    selector = fitted(traced(num, chained=False, seed=1), held)
    assert length(held, selector) >= length(held, None)
    plain = accepted(fresh, None, ALL).float()
    assert length(fresh, selector) > length(fresh, None) - 3 * float(plain.std() / len(plain) ** 0.5)


def test_a_reduced_vocabulary_and_tokens_it_lacks():
    """Target ids are twice the draft ids; odd ones cannot be drafted, and an unknown one teaches nothing."""

    def mapped(trace: CandidateTrace) -> CandidateTrace:
        tokens = 2 * trace.tokens
        tokens[::7, 2], tokens[::11, 3] = 2 * VOCAB - 1, UNKNOWN
        return trace._replace(tokens=tokens)

    target_ids, held = 2 * ALL, mapped(HELD)
    selector = fit.fit(mapped(traced(20_000, seed=1)), held, 2 * VOCAB, target_ids, 8)
    assert length(held, selector, target_ids) > length(held, None, target_ids) + 0.5
