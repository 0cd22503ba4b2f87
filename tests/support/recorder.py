"""Record what a drafter drafts inside a live engine, row by row, and compare it with the reference.

``record`` wraps ``propose`` of one drafter instance. It sees every draft before the engine does, so it can
also *plant*: hand the engine other drafts than those it noted, for instance right ones up to a chosen
column. So random heads get every rejection count, and the greedy output must still not change.
"""

import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.engines import Engine, Finished, Request, Settings
from tests.support.random_heads import VOCAB
from tests.support.reference import Draft, Reference, looked_up


@dataclass(frozen=True)
class Row:
    """One request's share of one ``propose`` call."""

    req: str  # the test's own request id
    p_last: int  # last valid position
    num_verified: int  # target rows of this request, refused ones included
    num_rejected: int  # refused draft tokens
    bonus: int | None  # token after p_last, None where a partial prefill has not sampled one
    draft: tuple[int, ...]  # K draft tokens, fewer where a step wants fewer


Plant = Callable[[Row], list[int]]


def _rows(engine: Engine, kwargs: Mapping[str, Any], drafts: torch.Tensor) -> list[Row]:
    batch = kwargs.get("input_batch")
    if batch is None:  # V1
        batch, starts = engine.runner.input_batch, kwargs["common_attn_metadata"].query_start_loc.tolist()
        positions, rejected = kwargs["target_positions"], kwargs.get("num_rejected_tokens_gpu")
        is_partial, sampled = engine.runner.discard_request_mask.np, kwargs["next_token_ids"]
    else:
        starts, positions, rejected = batch.query_start_loc_np.tolist(), batch.positions, kwargs["num_rejected"]
        is_partial, sampled = kwargs["num_sampled"] == 0, kwargs["last_sampled"].flatten()[batch.idx_mapping]
        drafts = drafts[:, : kwargs.get("num_speculative_tokens")]  # V2 keeps K columns when it wants fewer
    rows = []
    for b, draft in enumerate(drafts.tolist()):
        refused = 0 if rejected is None else int(rejected[b])
        p_last = int(positions[starts[b + 1] - 1]) - refused
        bonus = None if is_partial[b] else int(sampled[b])
        req = batch.req_ids[b].rpartition("-")[0] or batch.req_ids[b]  # vLLM may append "-" and eight random characters
        rows.append(Row(req, p_last, starts[b + 1] - starts[b], refused, bonus, tuple(draft)))
    return rows


@dataclass
class Recording:
    rows: list[Row] = field(default_factory=list)
    # The target's captured hidden states of valid rows, by (request, position); only if asked for.
    hidden: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)


@contextmanager
def record(engine: Engine, plant: Plant | None = None, keep_hidden: bool = False) -> Iterator[Recording]:
    """Note every row that the engine's drafter drafts; with ``plant``, give the engine others."""
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    drafter, noted = engine.drafter, Recording()
    original, signature = drafter.propose, inspect.signature(type(drafter).propose)

    def propose(*args: Any, **kwargs: Any) -> torch.Tensor:
        named = signature.bind(drafter, *args, **kwargs).arguments
        # Before drafting: where graphs share memory, the drafter's may write over what the target's left there.
        with gpu_sync_allowed():
            states = None
            if keep_hidden and not named.get("dummy_run"):
                states = named.get("target_hidden_states")
                states = torch.cat(named["aux_hidden_states"], dim=-1) if states is None else states
                states = states.to("cpu", torch.float32, copy=True)  # [rows, num_aux x hidden]
        drafts = original(*args, **kwargs)
        if named.get("dummy_run"):
            return drafts
        with gpu_sync_allowed():
            return noted_drafts(named, drafts, states)

    def noted_drafts(named: Mapping[str, Any], drafts: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """The drafts that the engine gets."""
        rows = _rows(engine, named, drafts)
        noted.rows.extend(rows)
        first = 0
        for row in rows if states is not None else ():
            num_valid = row.num_verified - row.num_rejected
            for j in range(num_valid):
                noted.hidden[row.req, row.p_last - num_valid + 1 + j] = states[first + j]
            first += row.num_verified
        if plant is None:
            return drafts
        drafts = drafts.clone()
        for b, row in enumerate(rows):
            drafts[b, : len(row.draft)] = torch.tensor(plant(row), dtype=drafts.dtype)
        return drafts

    drafter.propose = propose
    try:
        yield noted
    finally:
        del drafter.propose


def planter(right: Mapping[str, list[int]], vocab: int, num_right: int | None = None) -> Plant:
    """Plant some right tokens in each row, and wrong ones after them.

    Args:
        right: each request's whole token sequence, as it comes out without speculation.
        num_right: how many; by default a pseudo-random number 0..K for each row.
    """

    def plant(row: Row) -> list[int]:
        k, tokens = len(row.draft), right[row.req]
        rng = random.Random(f"{row.req}:{row.p_last}")
        few = rng.random() < 0.4  # few accepted tokens make many rows
        accepted = rng.randint(0, min(k, 1) if few else k) if num_right is None else num_right
        known = tokens[row.p_last + 2 : row.p_last + 2 + k]
        known += [0] * (k - len(known))
        return known[:accepted] + [(token + 1) % vocab for token in known[accepted:]]

    return plant


@dataclass
class Report:
    """What a comparison saw; reports add up."""

    rows: int = 0
    tokens: int = 0  # compared, in these rows
    looked_up: int = 0  # rows
    near_end: int = 0  # rows with a column at or beyond max_model_len
    ties: list[str] = field(default_factory=list)
    rejections: Counter[int] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)  # whatever else the caller counts

    def __iadd__(self, other: "Report") -> "Report":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def __str__(self) -> str:
        refused = " ".join(f"{n}:{c}" for n, c in sorted(self.rejections.items()))
        dropped = ", ".join(f"{c} {why}" for why, c in self.dropped.items()) or "none"
        counts = f"{self.rows} rows equal, {len(self.ties)} ties, {self.looked_up} looked up"
        return f"{counts}, {self.near_end} at the end; refused {refused}; dropped {dropped}"


def _ulp(value: float, dtype: str) -> float:
    """Distance of neighbouring numbers around ``value``."""
    kind = getattr(torch, dtype)
    x = torch.tensor(abs(value), dtype=kind)
    return float(torch.nextafter(x, torch.tensor(float("inf"), dtype=kind)) - x)


TIE_ULPS = {"float32": 256, "float16": 64, "bfloat16": 2}  # float32: the engine adds in another order
MAX_TIE_SHARE = {"float32": 0.0001, "float16": 0.01, "bfloat16": 0.002}  # of the tokens compared


def tolerance(draft: Draft, dtype: str) -> float:
    """Logits of ``draft`` that are as close as this may change places where an engine computes them."""
    return TIE_ULPS[dtype] * _ulp(float(draft.logits.max()), dtype)


class DifferentError(AssertionError):
    """Rows that are not the reference's; the message begins with ``N of M rows differ``."""


def compare(noted: Recording, finished: Mapping[str, Finished], reference: Reference, settings: Settings) -> Report:
    """Every noted row of an engine against the reference; raises AssertionError with the first differing rows.

    Left out, and counted: partial prefills (the engine throws their drafts away), rows whose bonus token
    lies past the request's end, and steps that want no drafts. Columns whose row would stand at or beyond
    ``max_model_len`` are left out of their row.

    Where hidden states were kept, the head is judged on those. In bfloat16 it must be: a target's hidden
    states depend on how many rows a kernel takes at once, and there one rounding in fifty moves a draft.
    """
    assert noted.rows, "the drafter was never asked"
    report, wrong = Report(), []
    k, max_model_len = settings.k, settings.max_model_len
    by_request: dict[str, list[Row]] = {}
    for row in noted.rows:
        if row.num_verified == k + 1:
            report.rejections[row.num_rejected] += 1
        if row.bonus is None:
            report.dropped["partial prefill"] += 1
        elif row.p_last + 1 >= len(finished[row.req].tokens):
            report.dropped["past the end"] += 1
        elif not row.draft:
            report.dropped["without drafts"] += 1
        else:
            report.near_end += row.p_last + len(row.draft) > max_model_len
            by_request.setdefault(row.req, []).append(row)
    for req, mine in by_request.items():
        tokens, p_lasts = finished[req].tokens, sorted({row.p_last for row in mine})
        aux = kept_hidden(noted, finished, req, max(p_lasts)) if noted.hidden else None
        expected = reference.drafts(tokens, p_lasts, k, aux)
        for row in mine:
            assert row.bonus == tokens[row.p_last + 1], f"{row}: the sequence holds {tokens[row.p_last + 1]}"
            report.rows += 1
            columns = min(len(row.draft), max_model_len - row.p_last)
            report.tokens += columns
            if settings.lookup and (copied := looked_up(tokens[: row.p_last + 2], columns, settings.lookup)):
                report.looked_up += 1
                if row.draft[:columns] != tuple(copied):
                    wrong.append(f"wrong: {row.req} p_last={row.p_last} drafted {row.draft}, looked up {copied}")
                continue
            near = tolerance(expected[row.p_last], reference.dtype)
            draft = expected[row.p_last].after(row.bonus, row.draft, near)
            verdict = _judge(row, draft, columns, reference.dtype)
            if verdict and verdict.startswith("tie"):
                report.ties.append(verdict)
            elif verdict:
                wrong.append(verdict)
    if wrong:
        raise DifferentError(f"{len(wrong)} of {report.rows} rows differ:\n" + "\n".join(wrong[:8]))
    return report


def serve_exactly(
    live: Engine,
    requests: Sequence[Request],
    reference: Reference,
    right: Mapping[str, list[int]] | None = None,
    num_right: int | None = None,
    keep_hidden: bool = False,
) -> tuple[Report, Recording]:
    """Run with planted drafts; drafts must equal the reference's, and output what comes without speculation.

    Args:
        right: each request's whole token sequence without speculation; by default the reference's.
    """
    right = right or {request.id: reference.greedy(request.prompt, request.max_tokens) for request in requests}
    with record(live, planter(right, VOCAB, num_right), keep_hidden) as noted:
        finished = live.run(requests)
    report = compare(noted, finished, reference, live.settings)
    print(report)
    aborted = {request.id for request in requests if request.aborted is not None}
    for req, done in finished.items():
        assert done.tokens == right[req][: len(done.tokens) if req in aborted else None], req
    return report, noted


def kept_hidden(noted: Recording, finished: Mapping[str, Finished], req: str, last: int) -> torch.Tensor:
    """[last + 1, width] hidden states of a request; where the prefix cache spared them, another request's."""
    tokens = finished[req].tokens

    def state(p: int) -> torch.Tensor:
        if (req, p) in noted.hidden:
            return noted.hidden[req, p]
        same = (o for o, f in finished.items() if (o, p) in noted.hidden and f.tokens[: p + 1] == tokens[: p + 1])
        return noted.hidden[next(same), p]

    return torch.stack([state(p) for p in range(last + 1)])


def _judge(row: Row, expected: Draft, columns: int, dtype: str) -> str | None:
    """None where the row equals the reference, else one line that says how it differs."""
    if row.draft[:columns] == expected.tokens[:columns]:
        return None
    ulps = {}  # how far below the best logit the drafted one is
    for i in range(columns):
        if row.draft[i] != expected.tokens[i]:
            best, got = expected.logit(i, expected.tokens[i]), expected.logit(i, row.draft[i])
            ulps[i] = (best - got) / _ulp(best, dtype)
    return (
        f"{'tie' if max(ulps.values()) <= TIE_ULPS[dtype] else 'wrong'}: {row.req} p_last={row.p_last} "
        f"refused={row.num_rejected}/{row.num_verified} drafted {row.draft[:columns]}, "
        f"expected {expected.tokens[:columns]}, ulps apart by column {ulps}"
    )
