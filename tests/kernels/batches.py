"""Random target batches, as both runners make them, for the kernel tests.

Everything is made on the CPU, where the twins run; kernels get it ``moved`` to where they run.
"""

import os
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from peagle_kernels import DraftBuffers, DraftStep, KVGroups, Layout, TargetBatch, geometry

MASK_TOKEN = 511
POISON = 0x5A5A  # what every output element holds before a kernel runs
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


def moved(thing: Any, device: str) -> Any:
    """``thing`` with every tensor on ``device``, strides kept; dataclasses and tuples of them alike."""
    if isinstance(thing, torch.Tensor):
        if thing.device.type == device:
            return thing
        return torch.empty_strided(thing.shape, thing.stride(), dtype=thing.dtype, device=device).copy_(thing)
    if is_dataclass(thing):
        return type(thing)(**{field.name: moved(getattr(thing, field.name), device) for field in fields(thing)})
    return tuple(moved(one, device) for one in thing) if isinstance(thing, tuple) else thing


@dataclass
class Case:
    """One random call of ``expand``: its arguments and its requests in plain Python."""

    requests: list["Request"]
    target: TargetBatch
    aux: tuple[torch.Tensor, ...]
    groups: KVGroups
    layout: Layout
    step: DraftStep
    max_speculative_tokens: int
    draft_lengths: list[int]

    def poisoned_buffers(self) -> DraftBuffers:
        """Buffers with room to spare, every element poisoned, the layout filled in."""
        layout, extra = self.layout, 5
        num_staging = max(layout.num_staging_rows, self.target.num_rows) + extra
        out = DraftBuffers.allocate(
            max_rows=layout.num_rows + extra,
            max_num_reqs=layout.num_reqs_padded + extra,  # a row of request state each, too
            max_speculative_tokens=self.max_speculative_tokens,
            max_staging_rows=num_staging,
            staging_width=sum(h.shape[1] for h in self.aux) or 1,
            num_groups=len(self.groups.block_tables),
            dtype=torch.float32,
            device="cpu",
        )
        for tensor in list(vars(out).values()):
            tensor.fill_(POISON)
        if not layout.static_length:
            starts = torch.tensor([0, *self.draft_lengths]).cumsum(0)
            out.query_start_loc[: len(starts)] = starts
        return out


@dataclass
class Request:
    """One request after its target step: verified rows at ``p0 .. p0+n-1``, ``rejected`` refused."""

    p0: int
    n: int
    rejected: int
    samples: bool  # False: a prefill chunk that is not the last
    is_dummy: bool


@st.composite
def cases(draw) -> Case:
    max_k = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 11, 18]))
    k = draw(st.integers(0, max_k))
    static = draw(st.booleans())
    # Room for the widest static request, so that only ragged prefills can outgrow max_model_len.
    max_model_len = draw(st.integers(2 * max_k + 1, 2 * max_k + 40))
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        n = draw(st.integers(1, min(max_k + 1, max_model_len) if static else max_model_len))
        p0 = draw(st.integers(0, max_model_len - n))
        rejected = draw(st.integers(0, min(n - 1, max_k)))
        samples = rejected > 0 or draw(st.booleans())
        requests.append(Request(p0, n, rejected, samples, draw(st.integers(0, 9)) == 0))
    num_padding_reqs = draw(st.integers(0, 2)) if static else 0
    num_padding_rows = draw(st.integers(0, 3))
    block_sizes = draw(st.lists(st.sampled_from([4, 16]), min_size=0, max_size=2))
    widths = draw(st.lists(st.sampled_from([3, 8]), min_size=0, max_size=4))
    return build(
        requests,
        k=k,
        max_k=max_k,
        static=static,
        shape_k=draw(st.integers(k, max_k)) if static else None,
        draws=draw(st.booleans()),
        max_model_len=max_model_len,
        num_padding_reqs=num_padding_reqs,
        num_padding_rows=num_padding_rows,
        block_sizes=block_sizes,
        widths=widths,
        seed=draw(st.integers(0, 2**31)),
    )


def build(
    requests: list[Request],
    *,
    k: int,
    max_k: int,
    static: bool,
    shape_k: int | None = None,
    draws: bool = False,
    max_model_len: int,
    num_padding_reqs: int = 0,
    num_padding_rows: int = 0,
    block_sizes: list[int],
    widths: list[int],
    seed: int,
) -> Case:
    """A case from its requests.

    Args:
        shape_k: K that a static layout is made for; the step may draft fewer. None: the step's own.
        draws: with temperatures and seeds.
    """
    rng = torch.Generator().manual_seed(seed)

    def randint(low: int, high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng).to(dtype)

    num_reqs = len(requests)
    num_query = torch.tensor([r.n for r in requests])
    num_rows = int(num_query.sum())
    num_states = num_reqs + 3
    idx_mapping = torch.randperm(num_states, generator=rng)[:num_reqs]
    idx_mapping[[i for i, r in enumerate(requests) if r.is_dummy]] = -1
    target = TargetBatch(
        input_ids=randint(1, 500, num_rows, dtype=torch.int32),
        positions=torch.cat([torch.arange(r.p0, r.p0 + r.n) for r in requests]),
        query_start_loc=torch.cat([torch.zeros(1), num_query.cumsum(0)]).int(),
        num_rejected=torch.tensor([r.rejected for r in requests], dtype=torch.int32),
        num_sampled=torch.tensor([int(r.samples) * (1 + r.n - r.rejected) for r in requests], dtype=torch.int32),
        idx_mapping=idx_mapping,
        last_sampled=randint(1, 500, num_states, dtype=torch.int64),
        next_prefill_tokens=randint(1, 500, num_states, dtype=torch.int32),
        num_reqs=num_reqs,
        num_rows=num_rows,
        temperature=torch.rand(num_states, generator=rng) if draws else None,
        seeds=randint(0, 1000, num_states, dtype=torch.int64) if draws else None,
    )
    tables = []
    for size in block_sizes:
        blocks = -(-max_model_len // size)
        tables.append(randint(0, 60, num_reqs + num_padding_reqs, blocks + 1, dtype=torch.int32)[:, :blocks])
    if static:
        length = geometry.static_length(max_k, k if shape_k is None else shape_k)
        lengths = [length] * (num_reqs + num_padding_reqs)
        num_draft_rows = sum(lengths) + num_padding_rows
        layout = Layout(num_draft_rows, len(lengths), static_length=length, staging_length=max_k + 1)
    else:
        lengths = geometry.ragged_lengths(num_query, k, max_model_len).tolist()
        layout = Layout(sum(lengths) + num_padding_rows, num_reqs)
    return Case(
        requests=requests,
        target=target,
        aux=tuple(torch.randn(num_rows + 2, width, generator=rng) for width in widths),
        groups=KVGroups(tuple(tables), tuple(block_sizes)),
        layout=layout,
        step=DraftStep(k, max_model_len, MASK_TOKEN),
        max_speculative_tokens=max_k,
        draft_lengths=lengths,
    )
