"""What a selector is fitted to: the candidates of a served drafter, and the target's own tokens."""

from pathlib import Path
from typing import NamedTuple, Self

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from peagle_kernels.select_candidates import Candidates, CandidateSelector, select_candidates_torch
from peagle_tools.shared.atomic_files import write_whole
from peagle_tools.shared.errors import ToolError

DEVELOPMENT_SHARE = 0.1
UNKNOWN = -1  # a token after the end of an answer


class CandidateTrace(NamedTuple):
    """N drafts of K positions with M candidates each. A draft begins after its bonus token."""

    ids: Tensor  # [N, K, M] int32 draft ids, best first
    logits: Tensor  # [N, K, M] float32
    hidden: Tensor  # [N, K, hidden_size] the drafter's hidden states after its last norm
    tokens: Tensor  # [N, K + 1] int32 target ids: the bonus token and what followed; UNKNOWN after the end
    prompt: Tensor  # [N] int32 which prompt it belongs to

    @classmethod
    def joined(cls, parts: "list[CandidateTrace]") -> Self:
        return cls(*(torch.cat(fields) for fields in zip(*parts, strict=True)))

    def rows(self, chosen: Tensor) -> "CandidateTrace":
        """The drafts that a boolean or index tensor names."""
        return CandidateTrace(*(field[chosen] for field in self))

    def divided(self) -> "tuple[CandidateTrace, CandidateTrace]":
        """Drafts to learn from, and the development share: those of a tenth of the prompts. ToolError: too few."""
        num = len(self.ids)
        num_prompts = int(self.prompt.max()) + 1 if num else 0
        is_held = self.prompt < max(1, round(DEVELOPMENT_SHARE * num_prompts))
        learned, held = self.rows(~is_held), self.rows(is_held)
        if not len(learned.ids) or not len(held.ids):
            raise ToolError(f"{num} drafts in all of the target's answers; ask for longer ones (--max-tokens)")
        return learned, held

    def save(self, file: Path) -> None:
        """Whole or not at all. Raises ToolError."""
        write_whole(file, save({name: tensor.contiguous() for name, tensor in self._asdict().items()}))

    @classmethod
    def load(cls, file: Path) -> Self:
        return cls(**load_file(file))

    def accepted(self, selector: CandidateSelector, target_ids: Tensor) -> Tensor:
        """[N] draft tokens that a greedy target accepts.

        Args:
            target_ids: [draft vocabulary] target id of each draft id.
        """
        assert selector.hidden_projection is not None
        gates = self.hidden.flatten(0, 1).float() @ selector.hidden_projection.float().T
        drafts = torch.empty(self.ids.shape[:2], dtype=torch.int64)
        ids, logits = self.ids.flatten(0, 1).long(), self.logits.flatten(0, 1)
        bonus = torch.arange(len(drafts)).repeat_interleave(drafts.shape[1])  # where tokens[:, 0] has a draft's
        candidates = Candidates(ids, logits, gates, self.tokens[:, 0], bonus)
        offsets = target_ids - torch.arange(len(target_ids))
        select_candidates_torch(drafts, candidates, selector, offsets, torch.empty_like(logits))
        return (drafts == self.tokens[:, 1:]).cumprod(dim=1).sum(dim=1)
