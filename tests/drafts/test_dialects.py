"""A head of any dialect, served as it is and converted, drafts what its weights must draft.

``random_heads`` writes the weights in vLLM's own format, which the reference reads; ``support.dialects`` gives them
another dialect's names and config.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from peagle_vllm.serving import RefusedError, check_loaded_head
from tests.conftest import ARM
from tests.drafts.grid import MAX_MODEL_LEN, requests
from tests.support import dialects as words
from tests.support.command import run
from tests.support.dialects import Written, read
from tests.support.engines import Settings, engine
from tests.support.random_heads import MASK_TOKEN, HeadSpec, write_head
from tests.support.recorder import serve_exactly
from tests.support.reference import Reference

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

K = 5
ASKED = requests(2, 12)


@dataclass(frozen=True)
class Case:
    spec: HeadSpec  # its weights and norms
    rewrite: Callable[[Written], object]  # vLLM's own config and names into the dialect's
    dtype: torch.dtype = torch.float32  # in which the weights are stored, exactly
    shards: int = 1  # files that hold them
    direct: bool = True  # whether vLLM is served this head as it is; the others need convert
    options: tuple[str, ...] = ()  # of convert

    def write_own(self, folder: Path, target: Path) -> Path:
        """The head in vLLM's own format, written from its facts and not by ``convert``."""
        head = read(write_head(folder, target, replace(self.spec, fmt="vllm")))
        for name, tensor in head.tensors.items():
            head.tensors[name] = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        return head.save(folder)

    def write(self, folder: Path, plain: Path) -> Path:
        """The same head in the dialect's words."""
        head = read(plain)
        head.shards = self.shards
        self.rewrite(head)
        return head.save(folder)


BARE = HeadSpec(own_embeddings=False, own_lm_head=False, norm_before_residual=True)
REDUCED = HeadSpec(draft_vocab=200)
NO_ID = ("--mask-token-id", str(MASK_TOKEN))
CASES = {
    "aws": Case(HeadSpec(), words.as_aws, dtype=torch.bfloat16),
    "aws-bare": Case(BARE, words.as_aws),
    "flat": Case(REDUCED, words.as_flat),
    "nemo": Case(HeadSpec("qwen3", fc_norm=True), words.as_nemo),
    "nemo-first": Case(HeadSpec(), words.as_nemo_first, shards=2),
    "specforge-with-id": Case(HeadSpec(), lambda h: words.as_specforge(h).config.update(mask_token_id=MASK_TOKEN)),
    "specforge": Case(HeadSpec("qwen3"), words.as_specforge, direct=False, options=NO_ID),
    "speculators-reduced": Case(
        replace(REDUCED, fc_norm=True, aux_layers=(1, 2, 4, 6, 8)), words.as_speculators, dtype=torch.float16, shards=3
    ),
    "speculators-bare": Case(replace(BARE, family="qwen3", aux_layers=(1, 3, 5, 7)), words.as_speculators),
    "speculators-window": Case(HeadSpec(norm_before_fc=True, windows=(8, 8)), words.as_speculators),
    "speculators-window-qwen3": Case(HeadSpec("qwen3", windows=(8, 8)), words.as_speculators),
    "target ids": Case(REDUCED, words.as_target_ids, direct=False),
}
MIXED = Case(HeadSpec(windows=(None, 8)), words.as_speculators)  # for Model Runner V2 only


def check_drafts(target: Path, head: Path, plain: Path) -> None:
    live = engine(Settings(target, head, k=K, max_model_len=MAX_MODEL_LEN))
    report, _ = serve_exactly(live, ASKED, Reference(target, plain))
    assert report.rows >= 8


@pytest.mark.parametrize("name", CASES if ARM == "plugin-v1" else ["speculators-mixed"])
def test_drafts_of_a_dialect(name: str, target: Path, tmp_path: Path):
    case = CASES.get(name, MIXED)
    plain = case.write_own(tmp_path / "plain", target)
    head, converted = case.write(tmp_path / "head", plain), tmp_path / "converted"
    if case.direct:
        check_drafts(target, head, plain)
    to = "speculators" if "speculators" not in name and len(name) % 2 else "vllm"
    ran = run("convert", head, converted, "--to", to, "--target", target, *case.options)
    assert ran.exit_code == 0, ran.stderr
    check_drafts(target, converted, plain)


@pytest.mark.arm("plugin-v1")
def test_windows_that_only_v2_serves_are_refused_on_v1(target: Path, tmp_path: Path):
    with pytest.raises(RefusedError, match=r"full_attention and sliding_attention layers, and the V1 "):
        engine(Settings(target, MIXED.write_own(tmp_path, target), k=K))


@pytest.mark.arm("plugin-v1")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.direct])
def test_what_needs_convert_is_refused_by_inspects_line(name: str, target: Path, tmp_path: Path):
    head = CASES[name].write(tmp_path / "head", CASES[name].write_own(tmp_path / "plain", target))
    inspected = run("inspect", head, "--target", target)
    assert inspected.exit_code == 1
    with pytest.raises(RefusedError) as refused:
        engine(Settings(target, head, k=K))
    line = str(refused.value).removeprefix("P-EAGLE refused: ")
    assert f"unfit    {line}" in inspected.stdout


@pytest.mark.arm("plugin-v1")
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_with_nan_or_inf_is_refused_when_it_is_loaded(value: float, target: Path, tmp_path: Path):
    head = read(CASES["aws"].write_own(tmp_path / "plain", target))
    head.tensors["layers.1.mlp.up_proj.weight"][-1, -1] = value
    with pytest.raises(RefusedError, match=r"up_proj.* NaN or Inf"):
        engine(Settings(target, head.save(tmp_path / "head"), k=K))


def test_a_head_is_judged_by_its_own_load_format(target: Path, tmp_path: Path, warned, monkeypatch):
    """A dummy head drafts for a real target, whose answers stay; beside a dummy target a head is checked."""
    head = CASES["aws"].write_own(tmp_path / "head", target)
    settings, reference = Settings(target, head, k=K, max_model_len=MAX_MODEL_LEN), Reference(target, head)
    dummy = engine(replace(settings, speculative=(("draft_load_config", {"load_format": "dummy"}),)))
    for req, done in dummy.run(ASKED).items():
        assert done.tokens == reference.greedy(done.request.prompt, done.request.max_tokens), req
    mixed = (("draft_load_config", {"load_format": "auto"}),)
    live = engine(replace(settings, speculative=mixed, llm=(("load_format", "dummy"),)))
    for value, fault in ((0, "mask_hidden is all zeros"), (3e38, "fc makes NaN or Inf")):
        live.drafter.model.mask_hidden.data.fill_(value)
        with pytest.raises(RefusedError, match=fault):
            check_loaded_head(live.drafter.model, live.drafter.vllm_config)
    monkeypatch.setattr(live.drafter.vllm_config.speculative_config, "draft_load_config", None)
    check_loaded_head(live.drafter.model, live.drafter.vllm_config)
    assert warned("the head has dummy weights, as the target has, until a draft weight update; add ")
