"""Recording in a running engine: what the served drafter proposed, and the target's own tokens."""

import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle_tools.shared import engines
from peagle_tools.sharpen import record
from peagle_tools.sharpen.trace import UNKNOWN, CandidateTrace
from peagle_vllm.heads.head import read_head, target_ids
from tests.conftest import ARM
from tests.sharpen.traces import accepted
from tests.support import recorder
from tests.support.dialects import read
from tests.support.engines import Engine, Settings, engine
from tests.support.models import PEAGLE_REDUCED, TARGET, prompt_token_ids
from tests.support.random_heads import write_selector
from tests.support.reference import ROUND, CandidateSampler, Draft, load_weights

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

K, M = 3, 5
# Prefills in chunks together with decodes; the interpreter takes a tenth of a second for a row.
NUM_REQUESTS, MAX_TOKENS, BUDGET = (2, 14, 64) if ARM == "plugin-v2" else (6, 40, 64)


def recorded(live: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trace, what the target answered, what vLLM's scheduler counted meanwhile, and every draft."""
    traces: list[CandidateTrace] = []
    answers: dict[str, record.RecordedAnswer] = {}
    counts: list[tuple[int, int]] = []
    trace_of, make_stats = record.trace_of, live.scheduler.make_spec_decoding_stats

    def keep(steps: Any, answered: dict[str, record.RecordedAnswer]) -> CandidateTrace:
        answers.update(answered)
        traces.append(trace_of(steps, answered))
        return traces[0]

    def note(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any) -> Any:
        counts.append((num_draft_tokens, num_accepted_tokens))
        return make_stats(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    monkeypatch.setattr(record, "trace_of", keep)
    monkeypatch.setattr(live.scheduler, "make_spec_decoding_stats", note)
    monkeypatch.setattr(engines.Pair, "engine", lambda *_: nullcontext(live.llm))
    prompts = [list(ids[:60]) for ids in prompt_token_ids()[:NUM_REQUESTS]]
    with recorder.record(live) as noted:
        record.record_all(engines.Pair("target", "head", {}), prompts, folder, K, M, MAX_TOKENS)
    live.drafter.observer = None
    written = CandidateTrace.load(folder / "000000.safetensors")  # hidden states in bfloat16
    assert torch.equal(written.tokens, traces[0].tokens) and torch.equal(written.ids, traces[0].ids)
    return traces[0], answers, counts, noted.rows


def test_recorded_drafts_are_those_that_were_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    live = engine(Settings(TARGET, PEAGLE_REDUCED, k=K, token_budget=BUDGET))
    trace, answers, counts, _ = recorded(live, tmp_path, monkeypatch)
    assert trace.ids.shape[1:] == (K, M) and trace.hidden.shape[1:] == (K, 128)
    assert (trace.logits[..., :-1] >= trace.logits[..., 1:]).all()
    assert set(trace.prompt.tolist()) == set(range(NUM_REQUESTS))
    right = accepted(trace, None, torch.from_numpy(target_ids(read_head(PEAGLE_REDUCED))))
    # Every draft but those of each answer's last step was verified; at the very end the scheduler counts tokens that
    # the answer has no room for.
    assert len(right) - len(answers) <= len(counts) <= len(right)
    whole = (trace.tokens != UNKNOWN).all(-1)
    assert abs(int(right.sum()) - sum(count for _, count in counts)) <= int((~whole).sum()) * K
    assert int(right.sum()) > len(answers)


def write_int8(folder: Path) -> None:
    """Make the head in ``folder`` one of 8-bit weights, as llm-compressor stores them."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme = preset_name_to_scheme("INT8", ["Linear", "re:.*lm_head$"])
    how = QuantizationConfig(
        config_groups={"group_0": scheme}, format="int-quantized", ignore=["re:.*fc$"], quantization_status="compressed"
    )
    head = read(folder)
    head.config["quantization_config"] = how.model_dump(mode="json", exclude_none=True)
    tensors = head.tensors
    for name in [name for name in tensors if name.endswith("_proj.weight") or name == "lm_head.weight"]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
        tensors[name], tensors[f"{name}_scale"] = (tensors[name] / scale).round().to(torch.int8), scale
    head.save(folder)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_reduced_head_with_a_selector_walks_over_its_candidates(
    quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each draft is the reference's choice, row by row, among the candidates that this very head was recorded with."""
    shutil.copytree(PEAGLE_REDUCED, tmp_path / "head")
    if quantized:
        write_int8(tmp_path / "head")
    head = read_head(tmp_path / "head")
    folder = write_selector(tmp_path / "head", torch.Generator().manual_seed(0), candidates=M)
    live = engine(Settings(TARGET, folder, k=K, token_budget=BUDGET))
    trace, answers, _, rows = recorded(live, tmp_path, monkeypatch)
    # Those in the trace.
    drafts = [row for row in rows if answers[row.req].num_prompt < row.p_last + 2 < len(answers[row.req].tokens)]
    stored = load_weights(folder / "edge", ROUND["float32"]).items()
    weights = {name.rpartition("candidate_selector.")[2]: tensor for name, tensor in stored}
    to_target, moved = torch.from_numpy(target_ids(head)), 0
    for row, candidates, logits, hidden in zip(drafts, trace.ids.long(), trace.logits, trace.hidden, strict=True):
        plain = torch.full((K, head.draft_vocab_size), -math.inf).scatter(1, candidates, logits)
        sampler = CandidateSampler(weights, M, hidden @ weights["hidden_projection.weight"].T)
        assert row.draft == sampler.draft(Draft((), plain, to_target), [row.bonus, *row.draft], 0.0).tokens
        moved += row.draft != tuple(to_target[candidates[:, 0]].tolist())
    assert moved > len(drafts) / 4
