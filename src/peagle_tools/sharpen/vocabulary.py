"""Which tokens a head should draft: those that its target says most."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from peagle_tools.shared.errors import ToolError
from peagle_tools.sharpen.trace import CandidateTrace
from peagle_vllm.heads.files import find, read_headers, read_json

SIZES_AN_OCTAVE, OCTAVES, MULTIPLE = 4, 12, 64  # vLLM pads lm_head to multiples of 64 rows
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
ACTIVE = ("num_experts_per_tok", "experts_per_token")


def special_ids(target: str) -> set[int]:
    """The tokens that the target's tokenizer adds to those that text is made of, ends of text among them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    return {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}


def count_tokens(trace: CandidateTrace, target_ids: Tensor, vocab_size: int, step: int | None = None) -> Tensor:
    """[vocab_size] how often the target said each token in the recorded answers.

    Drafts overlap where tokens were refused; the bonus token and the accepted ones of each make up the text once.

    Args:
        target_ids: [draft vocabulary] target id of each draft id.
        step: tokens between drafts where the answers were given; None: each begins after what was accepted.
    """
    num_k = trace.ids.shape[1]
    offsets = target_ids - torch.arange(len(target_ids))
    ends = 1 + trace.accepted(None, offsets, num_k)[:, None] if step is None else step
    said = torch.arange(num_k + 1) < ends
    return torch.bincount(trace.tokens[said & (trace.tokens >= 0)].long(), minlength=vocab_size)


def ranked(counts: Tensor, target_ids: Tensor, specials: set[int]) -> Tensor:
    """[draft vocabulary] draft ids: special tokens, then the most said. Equals: the lower id, which is the commoner
    token in vocabularies made by merging."""
    said = counts[target_ids]
    said[torch.isin(target_ids, torch.tensor(sorted(specials), dtype=torch.int64))] = counts.max() + 1
    return said.argsort(descending=True, stable=True)


def best_size(
    order: Tensor,
    target_ids: Tensor,
    held: CandidateTrace,
    least: int,
    round_bytes: Callable[[int], float],
) -> int:
    """The size with the most expected tokens a second: acceptance length over the bytes that a round moves.

    One request, and reading weights is all that takes time: so speed is tokens over bytes. Acceptance length is
    estimated from recorded drafts: each position takes its best candidate among the kept tokens, and is refused where
    the recorded candidates hold none.

    Args:
        order: ``ranked`` draft ids; from other answers than ``held``, whose rare tokens it would know otherwise.
        least: special tokens, which every size keeps.
        round_bytes: what a draft step and a target step move with so many draft tokens.
    """
    full = len(order)
    rank = torch.empty(full, dtype=torch.int32)
    rank[order] = torch.arange(full, dtype=torch.int32)
    ranks = rank[held.ids.long()]
    matches = target_ids[held.ids.long()] == held.tokens[:, 1:, None]

    def speed(size: int) -> float:
        kept = ranks < size
        drafted = kept.int().argmax(-1, keepdim=True)
        accepted = (matches & kept).gather(-1, drafted).squeeze(-1).cumprod(dim=1).sum(dim=1)
        return (1 + float(accepted.float().mean())) / round_bytes(size)

    steps = (full * 2 ** (-i / SIZES_AN_OCTAVE) for i in range(OCTAVES * SIZES_AN_OCTAVE))
    sizes = {min(full, -int(-size // MULTIPLE) * MULTIPLE) for size in steps}
    return max(sorted(size for size in sizes if size >= least), key=speed)


def target_bytes(target: str, num_tokens: int) -> float:
    """What the target's step reads of its weights for ``num_tokens`` rows: each once, experts as evenly chosen ones.

    Raises:
        ToolError: its weights' sizes are not known.
    """
    found = find(target)
    config = read_json(found / "config.json") if isinstance(found, Path) else found.config
    tensors = read_headers(found) if isinstance(found, Path) else found.tensors
    if not tensors:
        raise ToolError(f"{target} has no *.safetensors, and --draft-vocab auto needs their sizes; give a number")
    text = config.get("text_config") or config
    experts = next((text[key] for key in EXPERTS if text.get(key)), 0)
    active = next((text[key] for key in ACTIVE if text.get(key)), experts)
    share = 1 - (1 - active / experts) ** num_tokens if experts else 1.0
    has_output = any(name.startswith("lm_head.") or ".lm_head." in name for name in tensors)
    read = {n: info for n, info in tensors.items() if not (has_output and "embed_tokens" in n)}
    return sum(info.num_bytes * (share if ".experts." in name else 1) for name, info in read.items())
