"""Target batches of made-up requests, as both runners make them.

Everything is made on the CPU, where the twins run; kernels get it ``moved`` to where they run.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

from peagle_kernels import geometry
from peagle_kernels.batch import DraftBuffers, KVGroups, TargetBatch, allocate_buffers
from peagle_kernels.layout import DraftBatch, ragged_lengths

MASK_TOKEN = 511
POISON = 0x5A5A  # what every output element holds before a kernel runs
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@dataclass
class Request:
    """One request after its target step: verified rows at ``p0 .. p0+n-1``, ``rejected`` refused."""

    p0: int
    n: int
    rejected: int
    samples: bool = True  # False: a prefill chunk that is not the last
    is_dummy: bool = False


@dataclass
class Case:
    """One call of ``prepare_inputs``: its arguments and its requests in plain Python."""

    requests: list[Request]
    target: TargetBatch
    aux: tuple[torch.Tensor, ...]
    groups: KVGroups
    batch: DraftBatch
    max_model_len: int
    max_speculative_tokens: int
    draft_lengths: list[int]

    @property
    def constants(self) -> dict[str, int]:
        return {"max_model_len": self.max_model_len, "parallel_drafting_token_id": MASK_TOKEN}

    def buffers(self, extra: int = 0, fill: int = 0) -> DraftBuffers:
        """Buffers with room for ``extra`` rows and requests more, every element ``fill``, ragged starts filled in."""
        batch = self.batch
        num_staging = max(batch.num_staging_rows, batch.num_target_rows) + extra
        dtype = self.aux[0].dtype if self.aux else torch.float32
        out = allocate_buffers(
            max_rows=batch.num_rows + extra,
            max_num_reqs=max(batch.num_reqs_padded, len(self.target.seeds)) + extra,  # a row of request state each, too
            max_speculative_tokens=self.max_speculative_tokens,
            staging=torch.zeros(num_staging, sum(h.shape[1] for h in self.aux) or 1, dtype=dtype),
            slot_mappings=torch.zeros(len(self.groups.block_tables), batch.num_rows + extra, dtype=torch.int64),
        )
        for tensor in out:
            tensor.fill_(fill)
        if not batch.static_length:
            starts = torch.tensor([0, *self.draft_lengths]).cumsum(0)
            out.query_start_loc[: len(starts)] = starts
        return out


def build(
    requests: list[Request],
    *,
    k: int,
    max_k: int,
    static: bool,
    shape_k: int | None = None,
    shape_verified: int | None = None,
    max_model_len: int,
    num_padding_reqs: int = 0,
    num_padding_rows: int = 0,
    block_sizes: list[int],
    widths: list[int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """A case from its requests; token ids, request states and blocks are random.

    Args:
        max_k: the most draft tokens that buffers have room for; this step drafts ``k``.
        shape_k: K that a static layout is made for; the step may draft fewer. None: the step's own.
        shape_verified: verified drafts of a request that it is made for. None: ``max_k``.
        block_sizes: of each KV group.
        widths: of each captured hidden state, of ``dtype``.
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
        temperature=torch.rand(num_states, generator=rng),
        seeds=randint(0, 1000, num_states, dtype=torch.int64),
        top_k=randint(1, 500, num_states, dtype=torch.int32),
        top_p=torch.rand(num_states, generator=rng),
    )
    tables = []
    for size in block_sizes:
        blocks = -(-max_model_len // size)
        tables.append(randint(0, 60, num_reqs + num_padding_reqs, blocks + 1, dtype=torch.int32)[:, :blocks])
    if static:
        shape_verified = max_k if shape_verified is None else shape_verified
        length = geometry.static_length(shape_verified, k if shape_k is None else shape_k)
        lengths = [length] * (num_reqs + num_padding_reqs)
        num_draft_rows = sum(lengths) + num_padding_rows
        shape = {"static_length": length, "staging_length": shape_verified + 1}
    else:
        lengths = ragged_lengths(num_query.numpy(), k, max_model_len).tolist()
        num_draft_rows, shape = sum(lengths) + num_padding_rows, {}
    return Case(
        requests=requests,
        target=target,
        aux=tuple(torch.randn(num_rows + 2, width, generator=rng).to(dtype) for width in widths),
        groups=KVGroups(tuple(tables), tuple(block_sizes)),
        batch=DraftBatch(num_reqs, num_rows, k, num_draft_rows, len(lengths), **shape),
        max_model_len=max_model_len,
        max_speculative_tokens=max_k,
        draft_lengths=lengths,
    )


@st.composite
def cases(draw) -> Case:
    """Random batches of random requests."""
    max_k = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 11, 18]))
    k = draw(st.integers(0, max_k))
    static = draw(st.booleans())
    verified = draw(st.integers(0, max_k))
    # Room for the widest static request, so that only ragged prefills can outgrow max_model_len.
    max_model_len = draw(st.integers(2 * max_k + 1, 2 * max_k + 40))
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        n = draw(st.integers(1, verified + 1 if static else max_model_len))
        p0 = draw(st.integers(0, max_model_len - n))
        rejected = draw(st.integers(0, min(n - 1, max_k)))
        samples = rejected > 0 or draw(st.booleans())
        requests.append(Request(p0, n, rejected, samples, draw(st.integers(0, 9)) == 0))
    return build(
        requests,
        k=k,
        max_k=max_k,
        static=static,
        shape_k=draw(st.integers(k, max_k)) if static else None,
        shape_verified=verified,
        max_model_len=max_model_len,
        num_padding_reqs=draw(st.integers(0, 2)) if static else 0,
        num_padding_rows=draw(st.integers(0, 3)),
        block_sizes=draw(st.lists(st.sampled_from([4, 16]), min_size=0, max_size=2)),
        widths=draw(st.lists(st.sampled_from([3, 8]), min_size=0, max_size=4)),
        seed=draw(st.integers(0, 2**31)),
    )


def moved(thing: Any, device: str) -> Any:
    """``thing`` with every tensor in it on ``device``, strides kept."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == device:
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)

    return tree_map_only(torch.Tensor, move, thing)
