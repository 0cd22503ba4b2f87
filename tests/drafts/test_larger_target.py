"""Targets whose vocabulary was padded, or grew, after their head was trained: drafts equal the reference.

The new tokens are in prompts and answers. Where the head brings embeddings or a selector, these know nothing of them.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peagle_vllm.serving import RefusedError
from tests.support.dialects import edit, read
from tests.support.engines import Request, Settings, engine
from tests.support.random_heads import VOCAB, HeadSpec, prompt, write_head, write_target
from tests.support.recorder import serve_exactly
from tests.support.reference import Reference
from tests.support.updates import TRANSFER, files, updatable, update

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

K, MORE = 3, 9
REQUESTS = [Request("a", (*prompt(9), VOCAB, VOCAB + 4, *prompt(4, 2)), 16), Request("b", prompt(20, 1), 12)]
DRAWN = ("draft_sample_method", "probabilistic")
TOP_1 = (("temperature", 1.5), ("top_k", 1))
HEADS = {
    "all of its own": HeadSpec(),
    "all shared": HeadSpec(own_embeddings=False, own_lm_head=False),
    "own embeddings, a map and a selector": HeadSpec(draft_vocab=200, selector=True),
    "a map that says nothing": HeadSpec(fmt="aws"),
}


def grown(target: Path, more: int = MORE, likely: float = 3.0) -> Path:
    """The same target with tokens after its own, which its answers hold."""
    larger, gen = read(target), torch.Generator().manual_seed(3)
    for name, scale in (("model.embed_tokens.weight", 1.0), ("lm_head.weight", likely)):
        new = scale * larger.tensors[name][:more].roll(1, dims=1)
        larger.tensors[name] = torch.cat([larger.tensors[name], new + 0.01 * torch.randn(new.shape, generator=gen)])
    larger.config["vocab_size"] += more
    return larger.save(target)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grown(write_target(tmp_path_factory.mktemp("larger") / "target"))


@pytest.mark.parametrize("kind", HEADS)
def test_drafts_are_exact(kind: str, target: Path):
    spec = HEADS[kind]
    head = write_head(target.parent / kind, target, spec)
    reference = Reference(target, head)
    if spec.fmt == "aws":
        edit(head, lambda written: written.tensors.update(d2t=torch.arange(VOCAB)))
    right = {request.id: reference.greedy(request.prompt, request.max_tokens) for request in REQUESTS}
    assert sum(token >= VOCAB for tokens in right.values() for token in tokens) > 4
    settings = Settings(target, head, k=K, max_model_len=96, lookup=2 if spec.selector else 0, speculative=(DRAWN,))
    live = engine(settings if spec.selector or kind == "all shared" else replace(settings, speculative=()))
    report, _ = serve_exactly(live, REQUESTS, reference, right)
    assert report.rows > 8
    drawn = live.run([replace(request, sampling=TOP_1) for request in REQUESTS])
    assert {req: done.tokens for req, done in drawn.items()} == right


def test_an_update_of_the_weights(target: Path):
    specs = [HeadSpec(selector=True, seed=seed) for seed in (1, 2)]
    heads = [write_head(target.parent / f"update-{spec.seed}", target, spec) for spec in specs]
    live = updatable(Settings(target, heads[0], k=K, max_model_len=96, llm=(TRANSFER,)))
    update(live, *files(heads[1]))
    serve_exactly(live, REQUESTS, Reference(target, heads[1]))


@pytest.mark.arm("plugin-v1")
def test_other_tokens_are_refused(target: Path):
    """The lines themselves: tests/heads/test_bad_heads.py."""
    other = shutil.copytree(target, target.parent / "other")
    vocab = {f"word {i}": i for i in range(VOCAB + MORE)}
    (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    head = write_head(target.parent / "refused", target, HeadSpec())
    with pytest.raises(RefusedError, match=f"token {VOCAB} of .*, 'word {VOCAB}', was not added"):
        engine(Settings(other, head, k=K))
