"""Greedy drafts without a scattered logit, and in parts: the tokens that vLLM's whole logits give."""

from types import SimpleNamespace

import pytest
import torch

from peagle_vllm.sampling import greedy

pytestmark = pytest.mark.arm("plugin-v1")  # alike on the others, where vLLM must not be imported before an engine

VOCAB, HIDDEN = 40, 16
TOP_K = "vllm.model_executor.layers.logits_processor._topk"


class Processor:
    """vLLM's LogitsProcessor as far as it is used; counts how many rows it is given at a time."""

    def __init__(self, scale: float, head_dtype: torch.dtype | None):
        self.scale, self.head_dtype = scale, head_dtype
        self.org_vocab_size = VOCAB
        self.rows: list[int] = []
        self.asked_for_best = False

    def __call__(self, head, hidden_states: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden_states))
        return hidden_states @ head.weight.T * self.scale

    def get_top_tokens(self, head, hidden_states: torch.Tensor) -> torch.Tensor:
        self.asked_for_best = True
        return self(head, hidden_states).argmax(-1)

    def get_top_k_tokens(
        self, head, hidden_states: torch.Tensor, k: int, return_log_probs: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked_for_best = True
        logits = self(head, hidden_states)
        values, ids = (logits.log_softmax(-1) if return_log_probs else logits).topk(k)
        return ids, values


def model(draft_vocab: int = 7, tp_size: int = 1, scale: float = 1.0, head_dtype=None) -> SimpleNamespace:
    gen = torch.Generator().manual_seed(draft_vocab)
    chosen = torch.randperm(VOCAB, generator=gen)[:draft_vocab].sort().values
    lm_head = {"tp_size": tp_size, "num_embeddings_per_partition": draft_vocab, "org_vocab_size": VOCAB}
    return SimpleNamespace(
        config=SimpleNamespace(draft_vocab_size=draft_vocab),
        lm_head=SimpleNamespace(weight=torch.randn(draft_vocab, HIDDEN, generator=gen), **lm_head),
        logits_processor=Processor(scale, head_dtype),
        draft_id_to_target_id=None if draft_vocab == VOCAB else chosen - torch.arange(draft_vocab),
    )


def logits_of(head: SimpleNamespace, hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states @ head.lm_head.weight.T * head.logits_processor.scale


def scattered(head: SimpleNamespace, hidden_states: torch.Tensor) -> torch.Tensor:
    """As vLLM's compute_logits and argmax choose."""
    logits = logits_of(head, hidden_states)
    offsets = 0 if head.draft_id_to_target_id is None else head.draft_id_to_target_id
    whole = torch.full((len(logits), VOCAB), float("-inf"))
    whole[:, torch.arange(logits.shape[1]) + offsets] = logits
    return whole.argmax(-1)


@pytest.mark.parametrize("draft_vocab", [VOCAB, 7])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("scale", [0.5, -1.0])
@pytest.mark.parametrize(("limit_rows", "head_dtype"), [(1, None), (5, None), (12, None), (4, torch.float64)])
def test_the_same_tokens(
    draft_vocab: int, tp_size: int, scale: float, limit_rows: int, head_dtype, monkeypatch: pytest.MonkeyPatch
):
    """On their own, and written into some columns of a buffer. A wider head dtype has wider logits."""
    head, hidden_states = model(draft_vocab, tp_size, scale, head_dtype), torch.randn(12, HIDDEN)
    row_bytes = draft_vocab * (head_dtype or torch.float32).itemsize
    monkeypatch.setattr(greedy, "MAX_LOGITS_BYTES", limit_rows * row_bytes + 3)
    assert torch.equal(greedy.top_tokens(head, hidden_states), scattered(head, hidden_states))
    rows = head.logits_processor.rows
    num_parts = -(-12 // limit_rows)
    assert (len(rows), max(rows), sum(rows)) == (num_parts, 12 // num_parts, 12)  # equal parts, as few as may be
    # A sharded head gathers its shards' best, except where vLLM refuses to.
    assert head.logits_processor.asked_for_best == (tp_size > 1 and scale > 0)
    buffer = torch.full((6, 5), -7)
    out = greedy.top_tokens(head, hidden_states, out=buffer[:4, :3])
    assert torch.equal(buffer[:4, :3].flatten(), scattered(head, hidden_states))
    assert out.data_ptr() == buffer.data_ptr()
    assert (buffer[4:] == -7).all() and (buffer[:, 3:] == -7).all()


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("scale", [0.5, -1.0])
@pytest.mark.parametrize("limit_rows", [5, 12])
def test_the_same_candidates(tp_size: int, scale: float, limit_rows: int, monkeypatch: pytest.MonkeyPatch):
    head, hidden_states = model(7, tp_size, scale), torch.randn(12, HIDDEN)
    monkeypatch.setattr(greedy, "MAX_LOGITS_BYTES", limit_rows * 7 * 4)
    logits = logits_of(head, hidden_states)
    for log_probs, whole in ((False, logits), (True, logits.log_softmax(-1))):
        ids, values = greedy.top_candidates(head, hidden_states, 3, log_probs)
        assert torch.equal(ids, whole.topk(3).indices)
        torch.testing.assert_close(values, whole.topk(3).values)
    assert max(head.logits_processor.rows) == 12 // -(-12 // limit_rows)
    # On a CPU, vLLM's gathering of shards has no whole numbers.
    assert head.logits_processor.asked_for_best == (tp_size == 1 and scale > 0)


def does_not_compile(*args: object) -> None:
    raise RuntimeError("Could not find nvcc\nand a page more")


def test_the_same_candidates_where_flashinfer_does_not_compile(warned, monkeypatch: pytest.MonkeyPatch):
    """vLLM's top-k fails in the first call then, and is never asked again."""
    head, hidden_states = model(), torch.randn(12, HIDDEN).bfloat16()
    head.lm_head.weight = head.lm_head.weight.bfloat16()
    monkeypatch.setattr(TOP_K, does_not_compile)
    for _ in range(2):
        ids, values = greedy.top_candidates(head, hidden_states, 3)
    (line,) = warned("")
    assert "(RuntimeError: Could not find nvcc)" in line and "\n" not in line
    logits = logits_of(head, hidden_states).float()
    assert not head.logits_processor.asked_for_best
    assert values.dtype == torch.float32 and torch.equal(values, logits.topk(3).values)
    assert torch.equal(logits.gather(1, ids), values)


@pytest.mark.parametrize("here", [True, False])
def test_ranks_find_the_candidates_alike(here: bool, monkeypatch: pytest.MonkeyPatch):
    """Where it does not compile for one rank, the others must not wait for it in a collective."""
    head, agreed = model(tp_size=2), []
    row = SimpleNamespace(is_cpu=False, dtype=torch.float32, new_zeros=torch.zeros)
    monkeypatch.setattr(greedy, "on_all_ranks", lambda succeeded: agreed.append(succeeded) or False)
    if not here:
        monkeypatch.setattr(TOP_K, does_not_compile)
    assert not greedy._has_vllm_top_k(head, row, 3)
    assert agreed == [here] and not head.logits_processor.asked_for_best
