"""The rows of a P-EAGLE training step, taken apart so that the parts add up to the whole step.

N tokens make N real rows (depth 0), and a mask row (a, d) at position a + d for every anchor a and depth d > 0 that was
sampled. A real row attends to real rows only. A mask row attends to the real rows up to its anchor and to the mask rows
of its anchor up to its own depth. Once keys and values of the real rows are there, no anchor needs another.

speculators' layers call attention through transformers' ``AttentionInterface``; ``ATTENTION`` is ours. The attention
mask that a layer is given is then a function, (module, query, key, value, **options) -> [1, rows, heads, head_dim].
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from speculators.models.peagle.attention import create_peagle_mask_mod
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "peagle_partition"


@dataclass(frozen=True)
class StepRows:
    """Rows of one forward: ``anchor`` and ``depth``, [n] int64."""

    anchor: Tensor
    depth: Tensor

    @property
    def position(self) -> Tensor:
        return self.anchor + self.depth


def anchor_chunks(rows: StepRows, chunk_rows: int) -> list[StepRows]:
    """``rows`` in the order of their anchors, cut between anchors into chunks of about ``chunk_rows``."""
    order = rows.anchor.argsort(stable=True)  # depths of an anchor come in ascending order, and stay so
    anchor, depth = rows.anchor[order], rows.depth[order]
    counts = anchor.unique_consecutive(return_counts=True)[1]
    begins = counts.cumsum(0) - counts
    sizes = (begins // chunk_rows).repeat_interleave(counts).unique_consecutive(return_counts=True)[1].tolist()
    return [StepRows(*parts) for parts in zip(anchor.split(sizes), depth.split(sizes), strict=True)]


class Documents:
    """The documents packed in one sequence.

    Attributes:
        ids: document of each position, [N] int64, counted by runs; -1 is padding, which is kept as one more document.
        first: first position of each position's document, [N].
        spans: first and one past the last position of each.
    """

    def __init__(self, ids: Tensor):
        runs, counts = ids.unique_consecutive(return_inverse=True, return_counts=True)[1:]
        self.ids = torch.where(ids == -1, -1, runs)
        ends = counts.cumsum(0)
        self.first = (ends - counts).repeat_interleave(counts)
        self.spans = list(zip((ends - counts).tolist(), ends.tolist(), strict=True))

    def bias(self, start: int, stop: int, rows: StepRows, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where ``rows`` attend, else -inf: to real rows start..stop and themselves, [1, 1, n, stop-start + n]."""
        real = torch.arange(start, stop, device=self.ids.device)
        anchor = torch.cat([real, rows.anchor])
        depth = torch.cat([torch.zeros_like(real), rows.depth])
        sees = create_peagle_mask_mod(anchor, depth, self.ids, window)
        key = torch.arange(len(anchor), device=self.ids.device)
        seen = sees(None, None, key[len(real) :, None], key)
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))[None, None]


class RealRows:
    """Attention among the real rows, document by document; ``kept`` is the keys and values of the last call.

    A document needs no bias where no window cuts it; else its rows go in blocks of ``chunk_rows``, so that nothing is
    as large as the square of a document.
    """

    def __init__(self, documents: Documents, window: int | None, chunk_rows: int, dtype: torch.dtype):
        self.kept: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self.blocks: list[tuple[slice, slice, Tensor | None]] = []  # rows, keys, bias
        biases: dict[tuple[int, int], Tensor] = {}  # inside a document only the two lengths matter
        for start, stop in documents.spans:
            if window is None or stop - start <= window:
                self.blocks.append((slice(start, stop), slice(start, stop), None))
                continue
            for row in range(start, stop, chunk_rows):
                end, key = min(row + chunk_rows, stop), max(start, row - window + 1)
                if (row - key, end - row) not in biases:
                    anchor = torch.arange(row, end, device=documents.ids.device)
                    rows = StepRows(anchor, torch.zeros_like(anchor))
                    biases[row - key, end - row] = documents.bias(key, row, rows, window, dtype)
                self.blocks.append((slice(row, end), slice(key, end), biases[row - key, end - row]))

    def __call__(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.kept = key, value
        parts = [
            sdpa_attention_forward(module, query[:, :, rows], key[:, :, keys], value[:, :, keys], bias, **options)[0]
            for rows, keys, bias in self.blocks
        ]
        return torch.cat(parts, dim=1)


class MaskRows:
    """Attention of one chunk of mask rows: on the real rows' keys and values of the layer, and on the chunk's own."""

    def __init__(self, documents: Documents, rows: StepRows, window: int | None, dtype: torch.dtype):
        self.start, self.stop = int(documents.first[rows.anchor[0]]), int(rows.anchor[-1]) + 1
        if window is not None:  # an anchor is seen by its rows outside the window too
            in_window = int(rows.position.min()) - window + 1
            self.start = max(self.start, min(in_window, int(rows.anchor[0])))
        self.bias = documents.bias(self.start, self.stop, rows, window, dtype)

    def on(self, kept_key: Tensor, kept_value: Tensor) -> Callable[..., Tensor]:
        """The attention of a layer whose real rows have these keys and values, [1, heads, N, head_dim]."""

        def attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
            key = torch.cat([kept_key[:, :, self.start : self.stop], key], dim=2)
            value = torch.cat([kept_value[:, :, self.start : self.stop], value], dim=2)
            return sdpa_attention_forward(module, query, key, value, self.bias, **options)[0]

        return attention


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    return attention_mask(module, query, key, value, **options), None


AttentionInterface.register(ATTENTION, _attend)


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Callable, chunks: Iterable, num_inputs: int, *tensors: Tensor) -> Tensor:
        inputs = [tensor.detach().requires_grad_() for tensor in tensors[:num_inputs]]
        leaves = [*inputs, *tensors[num_inputs:]]
        sums = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in leaves]
        values: list[Tensor] = []
        for chunk in chunks:
            with torch.enable_grad():
                value = part(chunk, *inputs)
                gradients = torch.autograd.grad(value, leaves, allow_unused=True)
            for so_far, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    so_far += gradient
            values.append(value.detach())
            del value, gradients, gradient  # the next part needs their memory
        ctx.save_for_backward(*sums)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return torch.stack(values).sum() if values else sums[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, None, *((outer[0] * total).to(dtype) for total, dtype in gradients)


def chunked_sum(
    part: Callable[..., Tensor], chunks: Iterable, inputs: Sequence[Tensor], weights: Iterable[Tensor]
) -> Tensor:
    """The sum of ``part(chunk, *inputs)`` over ``chunks``, as one node of the graph, [] of the parts' dtype.

    Each part runs forward and backward at once and is freed; gradients are summed in float32 at least. ``part`` may
    use nothing that requires a gradient but ``inputs`` and the leaves ``weights``. Without chunks all of it is 0.
    """
    if not torch.is_grad_enabled():
        return sum((part(chunk, *inputs) for chunk in chunks), inputs[0].new_zeros(()))
    trained = [weight for weight in weights if weight.requires_grad]
    return _ChunkedSum.apply(part, chunks, len(inputs), *inputs, *trained)
