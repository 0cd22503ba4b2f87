"""speculators' P-EAGLE model, trained in parts: the same weights, loss and gradients, less memory."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from speculators.losses import LossConfig
from speculators.losses.utils import _LOSS_REDUCTION_EPS
from speculators.models import peagle, utils
from speculators.models.dflash2.model_definitions import CandidateSelector
from speculators.models.peagle.data import generate_cod_sample_indices
from speculators.models.peagle.metrics import compute_metrics
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from peagle_tools.shared.errors import ToolError
from peagle_tools.train.partition import ATTENTION, Documents, RowAttention, StepRows, anchor_chunks, chunked_sum
from peagle_tools.train.selector_training import mean_over_processes, selector_loss

utils.GEMMA_STYLE_FINAL_NORM_MODEL_TYPES |= {"qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"}
peagle.PEagleSpeculatorConfig._auto_class = None  # else each head is saved with the source of this class


class PEagleDraftModel(peagle.PEagleDraftModel):  # its name stands in config.json, where vLLM reads it
    """speculators' ``PEagleDraftModel`` with another ``forward``; weights and checkpoints are the same."""

    supports_gradient_checkpointing = False  # forward does it, and layers that do it again would lose keys and values

    def __init__(self, config: peagle.PEagleSpeculatorConfig):
        config.transformer_layer_config._attn_implementation = ATTENTION
        super().__init__(config)
        # The library takes the head's kind of norm for the target's, which scales by 1 + w in some families.
        norm = utils.resolve_verifier_norm_class(config)
        eps = config.transformer_layer_config.rms_norm_eps
        self.verifier_norm = norm(self.hidden_size, eps=eps).requires_grad_(False)
        if self.uses_sliding_window_attn:
            remedy = "begin without, and `peagle-vllm convert --window` gives the trained head one"
            raise ToolError(f"head: its layers have a sliding window, and none is trained so; {remedy}")
        self.candidate_selector: CandidateSelector | None = None

    def forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        document_ids: Tensor,
        loss_mask: Tensor,
        verifier_last_hidden_states: Tensor,
        loss_config: LossConfig | None = None,
        max_anchors: int | None = None,
        num_depths: int = 8,
        down_sample_ratio: float = 0.7,
        down_sample_ratio_min: float = 0.2,
        chunk_rows: int = 1024,
        **_: Any,
    ) -> tuple[None, Tensor, dict[str, Tensor]]:
        """Loss and metrics of one step, as speculators computes them from the same state of torch's generator.

        What else its trainer passes is not used, nor is ``position_ids`` there: positions count from the start of the
        sequence.

        Args:
            hidden_states: of the target, [1, N, n_aux * hidden].
            input_ids: [1, N] int64.
            document_ids: document of each position in one run each, -1 for padding, [1, N] int64.
            loss_mask: 1 where a position is supervised, [1, N]; 0 where a document begins, whose anchor would be of
                the document before, and in padding.
            verifier_last_hidden_states: of the target before its last norm, [1, N, hidden].
            num_depths: K, the real row's depth included.
            down_sample_ratio, down_sample_ratio_min: r and m; of depth d the share max(r^d, m) is kept, 1 keeps all.
            chunk_rows: rows computed at once, and those that finish the last anchor; memory grows with it.
        """
        documents = Documents(document_ids[0].to(hidden_states.device))
        how = num_depths, down_sample_ratio, down_sample_ratio_min
        all_rows = StepRows(*generate_cod_sample_indices(input_ids.shape[1], loss_mask, *how, max_anchors=max_anchors))
        is_mask = all_rows.depth > 0
        mask_rows = StepRows(all_rows.anchor[is_mask], all_rows.depth[is_mask])
        total = mean_over_processes(loss_mask[0, all_rows.position].sum(dtype=torch.float64), self)
        metrics: dict[str, Tensor] = {}
        selector_part = None
        if self.candidate_selector is not None:
            selector_part = selector_loss(self, metrics, input_ids, loss_mask, documents, all_rows)

        def loss_of(states: Tensor, rows: StepRows) -> Tensor:
            """What ``rows``, with these states [1, n, hidden], add to the loss of the step."""
            with torch.no_grad():
                targets = self.verifier_lm_head(self.verifier_norm(verifier_last_hidden_states[:, rows.position]))
            hidden = self.norm(states)
            logits = self.lm_head(hidden)
            which = loss_mask, rows.anchor, rows.depth
            loss, values = compute_metrics(logits, targets, *which, num_depths, loss_config)  # a mean over these rows
            count = loss_mask[0, rows.position].sum(dtype=torch.float64)
            share = ((count + _LOSS_REDUCTION_EPS) / (total + _LOSS_REDUCTION_EPS)).to(loss.dtype)
            for name, value in values.items():
                if name.endswith("loss_total"):
                    metrics[name] = value  # 1: a step
                else:
                    metrics[name] = metrics.get(name, 0) + value * (share if name.endswith("loss_sum") else 1)
            loss = loss * share
            return loss + selector_part(hidden[0], logits[0], rows) if selector_part else loss

        supervised = loss_mask[0].nonzero()[:, 0]
        total_loss = self.sum_over(loss_of, input_ids, hidden_states, documents, supervised, mask_rows, chunk_rows)
        return None, total_loss, metrics

    def sum_over(
        self,
        part: Callable[[Tensor, StepRows], Tensor],
        input_ids: Tensor,
        hidden_states: Tensor,
        documents: Documents,
        supervised: Tensor,
        mask_rows: StepRows,
        chunk_rows: int,
    ) -> Tensor:
        """The sum of ``part(states, rows)`` over chunks of rows, whose states [1, n, hidden] are before the last norm.

        Args:
            input_ids, hidden_states: [1, N] and [1, N, n_aux * hidden], as in ``forward``.
            supervised: positions of the real rows that ``part`` gets; all of them are attended to.
        """
        num_tokens = input_ids.shape[1]
        mask_id = input_ids.new_full((1, 1), self.mask_token_id)
        mask_hidden = self.mask_hidden.to(hidden_states)
        inputs = self._layer_input(torch.cat([input_ids, mask_id], 1), torch.cat([hidden_states, mask_hidden], 1))
        states, mask_row = inputs[:, :num_tokens], inputs[:, num_tokens:]  # all mask rows have one input
        positions = torch.arange(num_tokens, device=states.device)
        rotary = self.rotary_emb(states, positions[None])

        def run(layer: torch.nn.Module, states: Tensor, attention: Any, position: Tensor) -> Tensor:
            embeddings = tuple(part[:, position] for part in rotary)
            return layer(states, attention_mask=attention, position_ids=position[None], position_embeddings=embeddings)

        real = RowAttention(documents, states)

        def run_real(layer: torch.nn.Module, states: Tensor) -> tuple[Tensor, ...]:
            return run(layer, states, real.attend, positions), *real.kept

        kept: list[Tensor] = []
        for layer in self.layers:
            states, *key_value = checkpoint(run_real, layer, states, use_reentrant=False)
            kept += key_value

        def real_chunk(position: Tensor, states: Tensor) -> Tensor:
            return part(states[:, position], StepRows(position, torch.zeros_like(position)))

        def mask_chunk(rows: StepRows, mask_row: Tensor, *kept: Tensor) -> Tensor:
            states = mask_row.expand(-1, len(rows.anchor), -1)
            attention = RowAttention(documents, states, rows)
            for layer, *before in zip(self.layers, kept[::2], kept[1::2], strict=True):
                states = run(layer, states, partial(attention.attend, before=before), rows.position)
            return part(states, rows)

        output = [*self.norm.parameters(), *self.lm_head.parameters()]
        if self.candidate_selector is not None:
            output += self.candidate_selector.parameters()
        real_sum = chunked_sum(real_chunk, supervised.split(chunk_rows), [states], output)
        weights = chain(self.layers.parameters(), output)
        return real_sum + chunked_sum(mask_chunk, anchor_chunks(mask_rows, chunk_rows), [mask_row, *kept], weights)

    def _layer_input(self, input_ids: Tensor, hidden_states: Tensor) -> Tensor:
        """What the first layer reads, [1, n, 2 * hidden], of tokens [1, n] and target states [1, n, n_aux * hidden]."""
        embeds = self.embed_tokens(input_ids).to(hidden_states.dtype)
        if self.input_norm is not None:
            hidden_states = self.input_norm(hidden_states)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, hidden_states.chunk(len(self.fc_norm), dim=-1), strict=True)
            hidden_states = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return torch.cat([embeds, self.fc(hidden_states)], dim=-1)
