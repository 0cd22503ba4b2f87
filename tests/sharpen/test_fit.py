"""What is fitted: traces, accepted drafts against a selection by hand, standard errors, and what fitting gains."""

import pytest
import torch

from peagle_tools.shared.errors import ToolError
from peagle_tools.sharpen import fit
from peagle_tools.sharpen.trace import UNKNOWN, CandidateTrace, Gain
from tests.sharpen.traces import VOCAB, random_selector, trace

K, M = 3, 4
ALL = torch.arange(VOCAB)  # target ids where every token can be drafted


@pytest.mark.parametrize("reduced", [False, True])
def test_accepted_is_a_walk_by_hand(reduced: bool):
    made = trace(60)
    made.tokens[5:9, 2:] = UNKNOWN  # these answers end
    target_ids = (2 if reduced else 1) * torch.arange(VOCAB)
    selector = random_selector(K, M)
    if reduced:
        made.tokens[:, 1:] = torch.where(made.tokens[:, 1:] == UNKNOWN, UNKNOWN, 2 * made.tokens[:, 1:])
    counts = {None: [], selector: []}
    for row in range(len(made.ids)):
        for which, found in counts.items():
            previous, accepted = int(made.tokens[row, 0]), 0
            for i in range(K):
                scores = made.logits[row, i].clone()
                if which is not None:
                    gate = selector.hidden_projection @ made.hidden[row, i]
                    pairs = selector.successor_codebook[made.ids[row, i].long()] @ (
                        selector.predecessor_codebook[previous] * gate
                    )
                    scores = selector.unary_scale[i] * scores + selector.edge_scale[i] * pairs
                previous = int(target_ids[made.ids[row, i, scores.argmax()].long()])
                if previous != made.tokens[row, i + 1]:
                    break
                accepted += 1
            found.append(accepted)
    for which, found in counts.items():
        assert made.accepted(which, target_ids).tolist() == found
    assert counts[None] != counts[selector]


@pytest.mark.parametrize("num", [0, 8])
def test_too_few_drafts_are_one_line(num: int):
    """A target that ends every answer at once leaves none; 8 are of one prompt."""
    with pytest.raises(ToolError, match=rf"^{num} drafts in all of the target's answers; ask for longer ones"):
        trace(8).rows(torch.arange(num)).divided()


def test_the_standard_error_is_over_prompts():
    """Two drafts of each: prompt 4 has half a token more than the mean makes of them, prompt 9 half a token less."""
    found = Gain.of(torch.tensor([0, 3, 1, 1]), torch.tensor([4, 4, 9, 9]))
    assert found == Gain(2.25, pytest.approx((2 * 0.5**2) ** 0.5 / 4))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "LEARNING_RATE", 0.03)  # small tables and few steps


def fitted(form: str, learned: CandidateTrace, held: CandidateTrace) -> fit.Fitted:
    return fit.fit(form, learned, held, VOCAB, ALL, 8, lambda *_: None)


@pytest.mark.parametrize("form", fit.FORMS)
def test_fitting_finds_what_follows_what(form: str):
    learned, held, fresh = trace(40_000, seed=1), trace(2_000, seed=2), trace(2_000, seed=3)
    selector = fitted(form, learned, held).selector
    before, after = (Gain.of(fresh.accepted(which, ALL), fresh.prompt).length for which in (None, selector))
    assert before < 1.6
    assert after > 3.0  # 1 + .95 + .95**2 + .95**3 = 3.71 is all there is
    assert selector.predecessor_codebook.dtype == torch.bfloat16


@pytest.mark.parametrize("form", fit.FORMS)
@pytest.mark.parametrize("num", [200, 20_000])
def test_where_nothing_can_be_learned_nothing_is_lost(num: int, form: str):
    learned, held, fresh = (trace(n, chained=False, seed=i) for i, n in enumerate((num, 2_000, 4_000), start=1))
    found = fitted(form, learned, held)
    assert found.gain.length >= Gain.of(held.accepted(None, ALL), held.prompt).length
    before, after = (Gain.of(fresh.accepted(which, ALL), fresh.prompt) for which in (None, found.selector))
    assert after.length > before.length - 3 * before.error


def test_a_reduced_vocabulary_and_tokens_it_lacks():
    """Target ids are twice the draft ids; odd ones cannot be drafted, and an unknown one teaches nothing."""

    def mapped(made: CandidateTrace) -> CandidateTrace:
        tokens = 2 * made.tokens
        tokens[::7, 2], tokens[::11, 3] = 2 * VOCAB - 1, UNKNOWN
        return made._replace(tokens=tokens)

    target_ids, held = 2 * ALL, mapped(trace(2_000, seed=2))
    learned = mapped(trace(20_000, seed=1))
    selector = fit.fit("table", learned, held, 2 * VOCAB, target_ids, 8, lambda *_: None).selector
    before, after = (Gain.of(held.accepted(which, target_ids), held.prompt).length for which in (None, selector))
    assert after > before + 0.5


def test_a_heads_own_selector_is_fitted_further_in_its_shapes():
    """It knows half of what follows what; with nothing to learn it stays as it is."""
    learned, held, fresh = trace(4_000, seed=1), trace(2_000, seed=2), trace(2_000, seed=3)
    begun = fitted("gated", learned.rows(learned.tokens[:, 0] < VOCAB // 2), held).selector
    own = begun._replace(edge_scale=begun.edge_scale[-1:], unary_scale=begun.unary_scale[-1:])
    found = fit.fit(fit.OWN, learned, held, VOCAB, ALL, 8, lambda *_: None, own).selector
    before, after = (Gain.of(fresh.accepted(which, ALL), fresh.prompt).length for which in (own, found))
    assert after > before + 0.1
    assert [tensor.shape for tensor in found[:5]] == [tensor.shape for tensor in own[:5]]
    unknown = learned._replace(tokens=torch.full_like(learned.tokens, VOCAB - 1))
    assert fit.fit(fit.OWN, unknown, held, VOCAB, ALL, 8, lambda *_: None, own).selector is own
