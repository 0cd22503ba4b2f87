"""Recording in a running engine: what the served drafter proposed, beside what the target said."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from peagle_tools.shared import engines
from peagle_tools.shared.errors import ToolError
from peagle_tools.sharpen import record
from peagle_tools.sharpen.rewrite import rewrite
from peagle_tools.sharpen.trace import UNKNOWN, CandidateTrace
from peagle_vllm.heads.head import read_head, target_ids
from peagle_vllm.heads.target import read_target
from tests.conftest import ARM
from tests.support import recorder
from tests.support.engines import Engine, Request, Settings, engine
from tests.support.models import PEAGLE, PEAGLE_REDUCED, TARGET, prompt_token_ids
from tests.support.random_heads import write_selector
from tests.support.reference import ROUND, CandidateSampler, Draft, load_weights

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

K, M = 3, 5
# Prefills in chunks beside decodes; the interpreter takes a tenth of a second for a row.
NUM_REQUESTS, MAX_TOKENS, BUDGET = (2, 14, 64) if ARM == "plugin-v2" else (6, 40, 64)
PROMPT_TOKENS = 60


class Recorded(NamedTuple):
    """What some requests recorded, what they said, what vLLM's scheduler counted meanwhile, and every draft."""

    trace: CandidateTrace
    texts: dict[str, tuple[int, list[int], int]]
    counts: list[tuple[int, int]]
    drafts: list[recorder.Row]

    def known_drafts(self) -> list[recorder.Row]:
        """Those in the trace, in its order."""
        return [row for row in self.drafts if self.texts[row.req][2] < row.p_last + 2 < len(self.texts[row.req][1])]


def asked() -> list[Request]:
    prompts = prompt_token_ids()[:NUM_REQUESTS]
    return [Request(f"r-{i}", tuple(ids[:PROMPT_TOKENS]), MAX_TOKENS) for i, ids in enumerate(prompts)]


def unhook(drafter: Any) -> None:
    drafter.observer = None


def recorded(live: Engine) -> Recorded:
    worker = live.core.model_executor.driver_worker.worker
    counts = []
    original = live.scheduler.make_spec_decoding_stats

    def note(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any) -> Any:
        counts.append((num_draft_tokens, num_accepted_tokens))
        return original(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    live.scheduler.make_spec_decoding_stats = note
    requests = asked()
    with recorder.record(live) as noted:
        record.start(worker, M)
        finished = live.run(requests)
    rows = record.take(worker)
    assert record.take(worker) == []
    unhook(live.drafter)
    live.scheduler.make_spec_decoding_stats = original
    texts = {request.id: (i, finished[request.id].tokens, len(request.prompt)) for i, request in enumerate(requests)}
    return Recorded(record.trace_of(rows, texts), texts, counts, noted.rows)


def test_recorded_drafts_are_those_that_were_verified():
    made, texts, counts, _ = recorded(engine(Settings(TARGET, PEAGLE_REDUCED, k=K, token_budget=BUDGET)))
    offsets = load_offsets()
    assert made.ids.shape[1:] == (K, M) and made.hidden.shape[1:] == (K, 128)
    assert (made.logits[..., :-1] >= made.logits[..., 1:]).all()
    assert set(made.prompt.tolist()) == set(range(NUM_REQUESTS))
    accepted = made.accepted(None, offsets, K)
    # Every draft but those of each answer's last step was verified; at the very end the scheduler counts tokens that
    # the answer has no room for.
    assert len(accepted) - len(texts) <= len(counts) <= len(accepted)
    whole = (made.tokens != UNKNOWN).all(-1)
    assert abs(int(accepted.sum()) - sum(count for _, count in counts)) <= int((~whole).sum()) * K
    assert int(accepted.sum()) > len(texts)


def load_offsets() -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(PEAGLE_REDUCED / "model.safetensors")["d2t"]


@pytest.mark.parametrize(("kept", "quantize"), [(412, None), (412, "int8"), (None, "int8")])
def test_a_smaller_head_with_a_selector_walks_over_its_candidates(
    kept: int | None, quantize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each draft is the reference's choice, row by row, among the candidates that this very head was recorded with."""
    # On a CPU with AMX vLLM takes an int8 kernel that has no float32.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    if quantize and ARM == "plugin-v2":  # which compares lm_head with the target's; a CPU's int8 kernel keeps no weight
        monkeypatch.setattr("vllm.v1.worker.gpu.spec_decode.eagle.utils._should_share", lambda *args: False)
    ids = None if kept is None else torch.arange(512 - kept, 512)
    head = rewrite(read_head(PEAGLE), read_target(str(TARGET)), tmp_path / "head", ids, quantize)
    folder = write_selector(tmp_path / "head", torch.Generator().manual_seed(0), candidates=M)
    seen = recorded(engine(Settings(TARGET, folder, k=K, token_budget=BUDGET)))
    made, drafts = seen.trace, seen.known_drafts()
    weights = {
        name.rpartition("candidate_selector.")[2]: w
        for name, w in load_weights(folder / "edge", ROUND["float32"]).items()
    }
    to_target, moved = torch.from_numpy(target_ids(head)), 0
    for row, candidates, logits, hidden in zip(drafts, made.ids.long(), made.logits, made.hidden, strict=True):
        plain = torch.full((K, head.draft_vocab_size), -math.inf).scatter(1, candidates, logits)
        sampler = CandidateSampler(weights, M, hidden @ weights["hidden_projection.weight"].T)
        assert row.draft == sampler.draft(Draft((), plain, to_target), [row.bonus, *row.draft], 0.0).tokens
        moved += row.draft != tuple(to_target[candidates[:, 0]].tolist())
    assert moved > len(drafts) / 4


class Live(engines.Pair):
    """Records in an engine that is there."""

    def engine(self, num_k: int, longest: int, num_reqs: int) -> Any:
        assert self.arguments == dict(GIVEN.llm)
        return nullcontext(engine(GIVEN).llm)


GIVEN = Settings(TARGET, PEAGLE_REDUCED, k=K, llm=(("long_prefill_token_threshold", record.STEP),))


def test_given_answers_record_what_the_targets_own_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    live, length = engine(GIVEN), 14
    requests = [Request(r.id, r.prompt[:20], length + 1) for r in asked()]
    with recorder.record(live) as own:
        finished = live.run(requests)
    prompts, answers = [list(r.prompt) for r in requests], [finished[r.id].output[:length] for r in requests]
    with recorder.record(live) as given:
        record.record_all(Live("target", "head", {}), prompts, answers, tmp_path, K, M, length)
    unhook(live.drafter)
    names = dict(zip(sorted({row.req for row in given.rows}, key=int), (r.id for r in requests), strict=True))
    drafts = {(names[row.req], row.p_last): row.draft for row in given.rows}
    answering = [row for row in own.rows if row.p_last + 1 >= len(finished[row.req].request.prompt)]
    same = [drafts[row.req, row.p_last] == row.draft for row in answering if (row.req, row.p_last) in drafts]
    assert len(same) > 2 * len(requests) and all(same)
    made = CandidateTrace.load(tmp_path / "00000.safetensors")
    assert len(made.ids) > 4 * len(requests)
    best = load_offsets()[made.ids[:, :, 0].long()] + made.ids[:, :, 0]
    for number, request in enumerate(requests):
        text, first = [*finished[request.id].tokens, *[UNKNOWN] * K], len(request.prompt)
        rows = [r for r in given.rows if names[r.req] == request.id and first <= r.p_last + 1 < first + length]
        is_this = made.prompt == number
        assert made.tokens[is_this].tolist() == [text[row.p_last + 1 : row.p_last + K + 2] for row in rows]
        assert best[is_this].tolist() == [list(row.draft) for row in rows]

    monkeypatch.setattr(live.llm, "get_tokenizer", lambda: SimpleNamespace(decode=lambda ids: "It is"), raising=False)
    answers[1] = [(token + 1) % 512 for token in answers[1]]
    with pytest.raises(ToolError, match=r"that begins with 'It is' is not this target's, .* of its 14 \(up to 20%"):
        record.record_all(Live("target", "head", {}), prompts, answers, tmp_path / "other", K, M, 14)
    unhook(live.drafter)


def num_blocks(pair: engines.Pair) -> int:
    with pair.engine(K, 250, 5) as llm:
        return llm.llm_engine.vllm_config.cache_config.num_gpu_blocks


@pytest.mark.arm("plugin-v1")
def test_a_cpus_memory_is_taken_for_these_requests_only():
    """256 tokens are two blocks of vLLM's 128, and one block is vLLM's own; by default it takes 92% of all memory."""
    assert engines.in_process(num_blocks, engines.Pair(str(TARGET), str(PEAGLE), {"dtype": "float32"})) == 5 * 2 + 1
