"""Recording in a running engine: what the served drafter proposed, beside what the target said."""

from typing import Any

import pytest
import torch

from peagle_vllm.sharpen import record
from peagle_vllm.sharpen.lattice import UNKNOWN, Lattice
from tests.conftest import ARM
from tests.engines import Request, Settings, engine
from tests.models import PEAGLE_REDUCED, TARGET, prompt_token_ids

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

K, M = 3, 5
# Prefills in chunks beside decodes; the interpreter takes a tenth of a second for a row.
NUM_REQUESTS, MAX_TOKENS, BUDGET = (2, 14, 64) if ARM == "plugin-v2" else (6, 40, 64)


@pytest.fixture
def recorded() -> Any:
    """The lattice of some requests, what was asked and said, and what vLLM's scheduler counted meanwhile."""
    live = engine(Settings(TARGET, PEAGLE_REDUCED, k=K, token_budget=BUDGET))
    worker = live.core.model_executor.driver_worker.worker
    counts = []
    original = live.scheduler.make_spec_decoding_stats

    def note(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any) -> Any:
        counts.append((num_draft_tokens, num_accepted_tokens))
        return original(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    live.scheduler.make_spec_decoding_stats = note
    drafter = record.drafter_of(worker)
    record.start(worker, M)
    asked = [Request(f"r-{i}", tuple(ids[:60]), MAX_TOKENS) for i, ids in enumerate(prompt_token_ids()[:NUM_REQUESTS])]
    finished = live.run(asked)
    rows = record.take(worker)
    assert record.take(worker) == []
    for name in ("_sample", "_sample_draft_tokens", "propose"):
        vars(drafter).pop(name, None)
    live.scheduler.make_spec_decoding_stats = original
    texts = {request.id: (i, finished[request.id].tokens, len(request.prompt)) for i, request in enumerate(asked)}
    return record.lattice_of(rows, texts), texts, counts


def test_recorded_drafts_are_those_that_were_verified(recorded: tuple[Lattice, Any, list[tuple[int, int]]]):
    made, texts, counts = recorded
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
