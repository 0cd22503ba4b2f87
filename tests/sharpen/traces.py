"""Traces whose truth is known."""

import torch

from peagle_kernels.select_candidates import CandidateSelector
from peagle_tools.sharpen.trace import CandidateTrace

VOCAB, HIDDEN, DRAFTS_A_PROMPT = 20, 4, 10
NEXT = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))  # what follows each token, nearly always


def traced(num: int, k: int = 3, candidates: int = 4, chained: bool = True, seed: int = 0) -> CandidateTrace:
    """Drafts of a head that has the target's token among its candidates and ranks them by chance.

    Args:
        chained: NEXT follows the target's last token, nineteen times of twenty; else nothing but the head's logits
            tells what follows.
    """
    gen = torch.Generator().manual_seed(seed)
    drafts = [torch.randperm(VOCAB, generator=gen)[:candidates] for _ in range(num * k)]
    ids = torch.stack(drafts).view(num, k, candidates)
    logits = 0.5 * torch.randn(num, k, candidates, generator=gen)
    likely = logits.softmax(-1).flatten(0, 1).multinomial(1, generator=gen).view(num, k)
    tokens = torch.randint(VOCAB, (num, k + 1), generator=gen)
    for i in range(k):
        if chained:
            tokens[:, i + 1] = torch.where(torch.rand(num, generator=gen) < 0.95, NEXT[tokens[:, i]], tokens[:, i + 1])
            is_absent = (ids[:, i] != tokens[:, i + 1, None]).all(-1)
            slot = torch.randint(candidates, (num,), generator=gen)
            ids[is_absent, i, slot[is_absent]] = tokens[is_absent, i + 1]
        else:
            tokens[:, i + 1] = ids[:, i].gather(1, likely[:, i, None])[:, 0]
    order = logits.argsort(dim=-1, descending=True)
    prompt = torch.arange(num) // DRAFTS_A_PROMPT
    hidden = 1 + 0.3 * torch.randn(num, k, HIDDEN, generator=gen)  # a gate can be nearly constant
    return CandidateTrace(ids.gather(-1, order).int(), logits.gather(-1, order), hidden, tokens.int(), prompt.int())


def accepted(trace: CandidateTrace, selector: CandidateSelector | None, target_ids: torch.Tensor) -> torch.Tensor:
    """[N] draft tokens that the target accepts; without a selector each is its position's best."""
    if selector is not None:
        return trace.accepted(selector, target_ids)
    return (target_ids[trace.ids[:, :, 0].long()] == trace.tokens[:, 1:]).cumprod(dim=1).sum(dim=1)


def random_selector(k: int, candidates: int, rank: int = 5) -> CandidateSelector:
    """For a target with twice as many tokens as can be drafted."""
    gen = torch.Generator().manual_seed(1)
    sizes = (2 * VOCAB, rank), (VOCAB, rank), (rank, HIDDEN)
    tables = (torch.randn(size, generator=gen) for size in sizes)
    return CandidateSelector(*tables, torch.rand(k, generator=gen), torch.rand(k, generator=gen) + 0.5, candidates)
