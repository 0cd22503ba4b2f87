"""New weights for a head that is served. Drafts equal the reference of those that came last."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_kernels.select_candidates import CandidateSelector
from peagle_tools.sharpen.sharpening import write_sharpened
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.selector import EDGE_SCALE, PREDECESSORS, PROJECTION, SUCCESSORS, UNARY_SCALE
from peagle_vllm.serving import RefusedError
from tests.conftest import ARM
from tests.support.engines import Engine, Request, Settings, prepare_process
from tests.support.random_heads import HIDDEN, SELECTOR_CANDIDATES, VOCAB, HeadSpec, prompt, write_head
from tests.support.recorder import Recording, compare, planter, record, serve_exactly
from tests.support.reference import Reference
from tests.support.updates import TRANSFER, files, send, updatable, update

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

K = 3
REQUESTS = [Request("a", prompt(9), 10), Request("b", prompt(20, 1), 10)]


@pytest.fixture(scope="module")
def heads(target: Path) -> list[Path]:
    """Two heads of one shape, which share the target's embeddings."""
    specs = [HeadSpec(draft_vocab=200, own_embeddings=False, selector=True, seed=seed) for seed in (1, 2)]
    return [write_head(target.parent / f"head-{spec.seed}", target, spec) for spec in specs]


@pytest.fixture
def new(target: Path, heads: list[Path]) -> Reference:
    return Reference(target, heads[1])


@pytest.fixture
def live(target: Path, heads: list[Path]) -> Engine:
    """An engine that was started with the first head, and has that head's weights."""
    drawn = (("draft_sample_method", "probabilistic"),)
    live = updatable(Settings(target, heads[0], k=K, max_model_len=96, speculative=drawn, llm=(TRANSFER,)))
    update(live, *files(heads[0]))
    return live


def test_drafts_follow_an_update(live: Engine, heads: list[Path], new: Reference):
    model = live.drafter.model
    live.run(REQUESTS[:1])  # V1 has projected the old mask_hidden
    places = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    update(live, *files(heads[1]))
    serve_exactly(live, REQUESTS, new)
    assert {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())} == places  # that graphs read


def test_the_draft_vocabulary_stays_when_vllm_sleeps(live: Engine, target: Path, heads: list[Path]):
    """At level 2 it keeps the head's buffers, and nothing else."""
    model = live.drafter.model
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for tensor in (model.draft_id_to_target_id.data, *filter(torch.is_tensor, live.drafter.selector or ())):
        tensor.zero_()
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    serve_exactly(live, REQUESTS, Reference(target, heads[0]))


@pytest.mark.parametrize("draft_vocab", [200, VOCAB])
def test_a_head_that_begins_with_dummy_weights(target: Path, tmp_path: Path, draft_vocab: int):
    """It shares no module with its target for that, and takes a whole head only."""
    spec = HeadSpec(draft_vocab=draft_vocab, own_embeddings=True, selector=draft_vocab < VOCAB, seed=3)
    head = write_head(tmp_path / "head", target, spec)
    dummy = (("draft_load_config", {"load_format": "dummy"}),)
    live = updatable(Settings(target, head, k=K, max_model_len=96, speculative=dummy, llm=(TRANSFER,)))
    part = load_file(head / "model.safetensors")
    del part["mask_hidden"]
    save_file(part, tmp_path / "part")
    with pytest.raises(RefusedError, match="lacks mask_hidden"):
        update(live, tmp_path / "part")
    update(live, *files(head))
    serve_exactly(live, REQUESTS, Reference(target, head))


def test_pipeline_stages_without_the_head(live: Engine):
    """Each of them would fail, the last one begin, and never end."""
    from vllm.v1.worker.gpu_worker import Worker

    config = copy.copy(live.drafter.vllm_config)
    config.parallel_config = SimpleNamespace(pipeline_parallel_size=2)
    with pytest.raises(RefusedError, match="pipeline_parallel_size=1"):
        Worker._set_draft_weight_update_target(SimpleNamespace(vllm_config=config))


def test_requests_in_flight(live: Engine, target: Path, heads: list[Path], new: Reference):
    """Their KV is computed again where the caller resets vLLM's cache, as after an update of the target."""
    right = {request.id: new.greedy(request.prompt, request.max_tokens) for request in REQUESTS}
    step, steps = live.llm.llm_engine.step, []
    before = Recording()

    def step_or_update() -> Any:
        steps.append(None)
        if len(steps) == 4:
            update(live, *files(heads[1]))
            assert live.llm.reset_prefix_cache(reset_running_requests=True)
            before.rows, noted.rows = noted.rows, []
        return step()

    with record(live, planter(right, VOCAB)) as noted, patch.object(live.llm.llm_engine, "step", step_or_update):
        finished = live.run(REQUESTS)
    assert {req: done.tokens for req, done in finished.items()} == right
    for rows, reference in ((before, Reference(target, heads[0])), (noted, new)):
        assert compare(rows, finished, reference, live.settings).rows > 2


def test_a_selector_that_is_missing_is_off_until_it_comes(live: Engine, target: Path, heads: list[Path], new, warned):
    selector, head = files(heads[1])
    update(live, head)
    serve_exactly(live, REQUESTS, Reference(target, heads[1], selector=False))
    update(live, head)
    assert len(warned("drafts without the candidate selector until its new tensors come: ['candidate_")) == 1
    update(live, selector)
    serve_exactly(live, REQUESTS, new)


def test_parts_given_to_load_weights(live: Engine, heads: list[Path], new: Reference, warned):
    """As NeMo-RL and verl-SpeCo do. The target's embeddings stay its own."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    selector, head = (list(load_file(file).items()) for file in files(heads[1]))
    head = [(f"model.{name}", tensor) for name, tensor in head]
    head.append(("model.embed_tokens.weight", torch.zeros(VOCAB, HIDDEN)))
    model, config = live.drafter.model, live.drafter.vllm_config.speculative_config.draft_model_config
    live.run(REQUESTS[:1])  # V1 has projected the old mask_hidden
    initialize_layerwise_reload(model)  # vLLM's CPU build has repacked the linear layers; a GPU needs no such thing
    for part in (head[:5], head[5:], selector):
        model.load_weights(part)
    finalize_layerwise_reload(model, config)
    assert len(warned("ignores new weights of embed_tokens")) == 1
    serve_exactly(live, REQUESTS, new)


def test_what_sharpen_wrote_for_the_served_head(live: Engine, target: Path, heads: list[Path], tmp_path: Path):
    """Another selector of the same shapes, and nothing else."""
    head, tensors = read_head(heads[0]), load_file(files(heads[0])[0])
    successors = torch.randn(tensors[SUCCESSORS].shape, generator=torch.Generator().manual_seed(0))
    tensors[SUCCESSORS] = successors.bfloat16()
    names = PREDECESSORS, SUCCESSORS, PROJECTION, EDGE_SCALE, UNARY_SCALE
    fitted = CandidateSelector(*(tensors[name] for name in names), SELECTOR_CANDIDATES)
    for number, way in enumerate((update, lambda _, file: live.drafter.model.load_weights(load_file(file).items()))):
        out = tmp_path / str(number)
        out.mkdir()
        write_sharpened(out, head, fitted)
        way(live, files(out)[0])
        serve_exactly(live, REQUESTS, Reference(target, out))
        update(live, *files(heads[0]))


def test_after_a_failure_nothing_is_drafted_until_an_update_is_whole(
    live: Engine, heads: list[Path], new: Reference, warned, tmp_path: Path
):
    selector, head = files(heads[1])
    weights = load_file(head)
    k_proj, q_proj = (f"layers.0.self_attn.{name}_proj.weight" for name in "kq")
    save_file({k_proj: weights[k_proj], q_proj: weights[q_proj][:-1].clone()}, tmp_path / "too small")
    del weights["fc.weight"]
    save_file(weights, tmp_path / "without fc")
    codebook = load_file(selector)["candidate_selector.predecessor_codebook"]
    save_file({"candidate_selector.predecessor_codebook": codebook.T.contiguous()}, tmp_path / "transposed")

    def draft_nothing() -> None:
        """Text continues, and the sampler takes each zero as drawn from a distribution that has only this one.

        Those of requests outside the batch stay: their drafts may still be verified.
        """
        before = None if ARM == "plugin-v1" else live.drafter.draft_logits.clone()
        with record(live) as noted:
            finished = live.run([Request("a", prompt(9), 6)])
        assert finished["a"].tokens == new.greedy(prompt(9), 6)
        assert {row.draft for row in noted.rows} - {()} == {(0,) * K}  # on vLLM 0.33 the last step wants none
        if ARM == "plugin-v1":
            assert live.drafter.take_last_draft_probs() is None
        else:
            draft_logits = live.drafter.draft_logits
            is_nothing = ((draft_logits.exp().sum(-1) == 1) & (draft_logits[..., 0] == 0)).all(1)
            changed = (draft_logits != before).flatten(1).any(1)
            assert is_nothing.any() and changed.sum() <= 1 and not (changed & ~is_nothing).any()

    for broken in ("too small", "transposed"):
        with pytest.raises(RuntimeError):
            update(live, tmp_path / broken)
        draft_nothing()
    assert len(warned("predecessor_codebook is [")) == 1
    send(live, tmp_path / "without fc")
    draft_nothing()
    with pytest.raises(RefusedError, match=r"lacks fc\.weight"):
        live.llm.finish_weight_update()
    draft_nothing()
    update(live, selector, head)
    with pytest.raises(RefusedError, match="NaN"):
        live.drafter.model.load_weights([("fc.weight", torch.full((1,), torch.nan))])
    draft_nothing()
    assert len(warned("drafts zeros until a whole update of the head's weights succeeds")) == 4
    update(live, selector, head)
    serve_exactly(live, REQUESTS, new)
    if ARM == "plugin-v2":  # what stood for nothing is gone from the distributions of drafts
        assert live.drafter.draft_logits.isfinite().sum(-1).max() <= SELECTOR_CANDIDATES


def test_a_quantized_copy_of_the_targets_lm_head_leaves_the_head(monkeypatch: pytest.MonkeyPatch):
    """``draft_lm_head_quantization``: vLLM 0.33 would put the target's own lm_head there, and take it apart."""
    prepare_process()  # before vLLM is imported
    from peagle_vllm import updates

    target, head = torch.nn.Module(), torch.nn.Module()
    target.lm_head, head.lm_head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    head.mask_hidden = torch.zeros(4)
    head.draft_id_to_target_id, quantized = None, head.lm_head
    try:
        from vllm.model_executor.layers.quantization.online.lm_head import _SOURCES

        _SOURCES[quantized] = target.lm_head, "fp8"
    except ImportError:  # vLLM 0.32 has no such copies
        monkeypatch.setattr(updates, "_quantized_copies", lambda: [(quantized, target.lm_head)])
    monkeypatch.setattr(updates, "on_all_ranks", bool)
    config = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=None)))
    served, loaded = updates.HeadUpdates(head, target, None, config), []
    served.begin()
    assert "lm_head" not in head._modules
    sent = torch.ones(4)
    served.load(loaded.extend, [("lm_head.weight", torch.ones(4, 4)), ("mask_hidden", sent)])
    sent.zero_()  # the transfer's memory
    served.end(None)
    assert head.lm_head is quantized and head.mask_hidden.all() and not loaded
    monkeypatch.setattr(updates, "on_all_ranks", lambda _: False)
    monkeypatch.setattr(updates, "finalize_layerwise_reload", lambda *_: None)
    served.begin()
    served.end(None)  # it failed on another rank
    assert served.paused
