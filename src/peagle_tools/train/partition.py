"""The rows of a P-EAGLE training step, taken apart so that the parts add up to the whole step.

N tokens make N real rows (depth 0), and a mask row (a, d) at position a + d for every anchor a and depth d > 0 that was
sampled. A real row attends to real rows only. A mask row attends to the real rows up to its anchor and to the mask rows
of its anchor up to its own depth. Once keys and values of the real rows are there, no anchor needs another.

speculators' layers call attention through transformers' ``AttentionInterface``; ``ATTENTION`` is ours. The attention
mask that a layer is given is then a function, (module, query, key, value, **options) -> [1, rows, heads, head_dim].
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
        ids: document of each position, in one run each, [N] int64; padding is one more.
        first: first position of each position's document, [N].
        spans: first and one past the last position of each.
    """

    def __init__(self, ids: Tensor):
        self.ids = ids
        counts = ids.unique_consecutive(return_counts=True)[1]
        ends = counts.cumsum(0)
        self.first = (ends - counts).repeat_interleave(counts)
        self.spans = list(zip((ends - counts).tolist(), ends.tolist(), strict=True))


Run = tuple[int, int]  # the first and one past the last


class RowAttention:
    """Attention of the real rows, or of a chunk of mask rows on those and on themselves.

    A document's rows attend at once, and documents of like sizes: each is padded to the longest of its batch.

    Args:
        mask_rows: the chunk; None: the real rows.
    """

    kept: tuple[Tensor, ...] = ()  # key and value of the last call

    def __init__(self, documents: Documents, like: Tensor, mask_rows: StepRows | None = None):
        real_segments = [(span, (span[0], span[0])) for span in documents.spans]
        segments = _mask_segments(documents, mask_rows) if mask_rows else real_segments
        self.batches: list[tuple[Tensor, Tensor, Tensor | None]] = []  # rows, keys, bias
        place, num_places = torch.zeros(max(stop for (_, stop), _ in segments), dtype=torch.int64), 0
        for batch in _of_like_sizes(segments):
            padded = [index for runs in zip(*batch, strict=True) for index in _padded(runs)]
            rows, in_rows = padded[:2]
            place[rows[in_rows]] = num_places + in_rows.flatten().nonzero()[:, 0]
            num_places += rows.numel()
            rows, in_rows, keys, in_keys = (index.to(like.device) for index in padded)
            if mask_rows:
                anchor, depth = mask_rows.anchor[rows], mask_rows.depth[rows]
                real = (keys[:, None] <= anchor[:, :, None]) & in_keys[:, None]
                mask = (anchor[:, :, None] == anchor[:, None]) & (depth[:, :, None] >= depth[:, None])
                seen = torch.cat([real, mask & in_rows[:, None]], dim=-1)
                bias = like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))[:, None]
                self.batches.append((rows, torch.cat([keys, rows + len(documents.ids)], dim=1), bias))
            else:
                self.batches.append((rows, rows, None))  # each attends to those before it
        self.place = place.to(like.device)  # of each row, in the batches' output

    def attend(self, module: Any, query: Tensor, *kept: Tensor, before: Sequence[Tensor] = (), **more: Any) -> Tensor:
        """Of query, key and value, [1, heads, rows, head_dim] each, [1, rows, heads, head_dim].

        Args:
            before: key and value of the real rows, which mask rows attend to.
        """
        self.kept = kept
        key, value = (torch.cat(both, dim=2) for both in zip(before, kept, strict=True)) if before else kept

        def take(tensor: Tensor, index: Tensor) -> Tensor:
            return tensor[0].index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1)

        outputs = [
            sdpa_attention_forward(module, take(query, rows), take(key, keys), take(value, keys), bias, **more)[0]
            for rows, keys, bias in self.batches
        ]
        return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, self.place)[None]


def _mask_segments(documents: Documents, rows: StepRows) -> list[tuple[Run, Run]]:
    """For each document, its run of ``rows``, and the real positions up to its last anchor there."""
    first = documents.first[rows.anchor]
    counts = first.unique_consecutive(return_counts=True)[1]
    stops = counts.cumsum(0)
    ends = torch.stack([stops - counts, stops, first[stops - 1], rows.anchor[stops - 1] + 1])
    return [((start, stop), (first, after)) for start, stop, first, after in ends.T.tolist()]


def _of_like_sizes(segments: list[tuple[Run, Run]]) -> Iterator[list[tuple[Run, Run]]]:
    """Runs of rows and of real positions before them, by size, in batches whose padding takes no more than they do."""

    def size(segment: tuple[Run, Run]) -> tuple[int, int]:
        rows, before = (stop - start for start, stop in segment)
        return rows, before + rows

    batch: list[tuple[Run, Run]] = []
    for segment in sorted(segments, key=size, reverse=True):
        more = [*batch, segment]
        rows, keys = zip(*map(size, more), strict=True)
        if len(more) * max(rows) * max(keys) > 2 * sum(map(operator.mul, rows, keys)):
            yield batch
            more = [segment]
        batch = more
    yield batch


def _padded(runs: Sequence[Run]) -> tuple[Tensor, Tensor]:
    """Indices of runs from start to stop, [runs, longest], the last one repeated, and which are in their run."""
    starts, stops = torch.tensor(runs).T[:, :, None]
    index = starts + torch.arange(int((stops - starts).max()))
    return index.minimum(stops - 1), index < stops


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


def chunked_sum(part: Callable, chunks: Iterable, inputs: Sequence[Tensor], weights: Iterable[Tensor]) -> Tensor:
    """The sum of ``part(chunk, *inputs)`` over ``chunks``, as one node of the graph, [] of the parts' dtype.

    Each part runs forward and backward at once and is freed; gradients are summed in float32 at least. ``part`` may
    use nothing that requires a gradient but ``inputs`` and the leaves ``weights``. Without chunks all of it is 0.
    """
    if not torch.is_grad_enabled():
        return sum((part(chunk, *inputs) for chunk in chunks), inputs[0].new_zeros(()))
    trained = [weight for weight in weights if weight.requires_grad]
    return _ChunkedSum.apply(part, chunks, len(inputs), *inputs, *trained)
