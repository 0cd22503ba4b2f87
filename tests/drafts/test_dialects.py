"""A head of any dialect, served as it is and converted, drafts what the same weights draft in vLLM's own format."""

from dataclasses import replace
from pathlib import Path

import pytest

from peagle_vllm.serving import RefusedError, check_loaded_head
from tests.conftest import ARM
from tests.drafts.dialects import CASES, Case, read, write_dialect, write_own
from tests.drafts.grid import MAX_MODEL_LEN, requests
from tests.inspect.running import run
from tests.support import random_heads as tiny_heads
from tests.support.engines import Settings, engine, without_speculation
from tests.support.random_heads import HeadSpec
from tests.support.recorder import planter, record

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

K = 5
V2 = ARM == "plugin-v2"
ASKED = requests(4, 12)[:2]
Drafts = dict[tuple[str, int], tuple[int, ...]]  # by request and p_last


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_heads.write_target(tmp_path_factory.mktemp("dialects") / "target")


@pytest.fixture(scope="module")
def right(target: Path) -> dict[str, list[int]]:
    """Each request's tokens without speculation."""
    alone = without_speculation(Settings(target, max_model_len=MAX_MODEL_LEN), ASKED)
    return {req: done.tokens for req, done in alone.items()}


def drafts(target: Path, head: Path, right: dict[str, list[int]]) -> Drafts:
    live = engine(Settings(target, head, k=K, max_model_len=MAX_MODEL_LEN))
    with record(live, planter(right, tiny_heads.VOCAB)) as noted:
        finished = live.run(ASKED)
    assert {req: done.tokens for req, done in finished.items()} == right
    return {(row.req, row.p_last): row.draft for row in noted.rows}


@pytest.fixture(scope="module")
def expected(target: Path, right: dict[str, list[int]]):
    """What each set of weights drafts in vLLM's own format; one engine a set."""
    known: dict[tuple, tuple[Path, Drafts]] = {}

    def of(case: Case) -> tuple[Path, Drafts]:
        key = repr(case.weights)
        if key not in known:
            plain = write_own(target.parent / f"own-{len(known)}", target, case)
            known[key] = plain, drafts(target, plain, right)
        return known[key]

    return of


# Cases of the same weights stand together, so that fewer engines start.
ORDER = sorted((name for name in CASES if CASES[name].v2 is V2), key=lambda name: repr(CASES[name].weights))


@pytest.mark.parametrize("name", ORDER)
def test_drafts_of_a_dialect(name: str, target: Path, right, expected, monkeypatch: pytest.MonkeyPatch):
    case, folder = CASES[name], target.parent
    plain, wanted = expected(case)
    assert len(wanted) >= 12 and len(set(wanted.values())) >= len(wanted) // 2
    head = write_dialect(folder / name, plain, case)
    if case.direct:
        assert drafts(target, head, right) == wanted, "served as it is"
    to = "speculators" if "speculators" not in name and len(name) % 2 else "vllm"
    ran = run(monkeypatch, "convert", head, folder / f"{name}-converted", "--to", to, "--target", target, *case.options)
    assert ran.code == 0, ran.err
    assert drafts(target, folder / f"{name}-converted", right) == wanted, f"converted to {to}"


@pytest.mark.arm("plugin-v1")
def test_windows_that_only_v2_serves_are_refused_on_v1(target: Path):
    plain = write_own(target.parent / "mixed", target, CASES["speculators-mixed"])
    with pytest.raises(RefusedError, match=r"full_attention and sliding_attention layers, and the V1 "):
        engine(Settings(target, plain, k=K))


@pytest.mark.arm("plugin-v1")
def test_what_needs_convert_is_refused_by_inspects_line(target: Path, monkeypatch: pytest.MonkeyPatch):
    for name in (name for name, case in CASES.items() if not case.direct):
        plain = write_own(target.parent / f"{name}-own", target, CASES[name])
        head = write_dialect(target.parent / f"{name}-refused", plain, CASES[name])
        inspected = run(monkeypatch, "inspect", head, "--target", target)
        assert inspected.code == 1
        with pytest.raises(RefusedError) as refused:
            engine(Settings(target, head, k=K))
        line = str(refused.value).removeprefix("P-EAGLE refused: ")
        assert f"unfit    {line}" in inspected.out


@pytest.mark.arm("plugin-v1")
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_with_nan_or_inf_is_refused_when_it_is_loaded(value: float, target: Path):
    head = read(write_own(target.parent / f"with {value}", target, CASES["aws"]))
    head.tensors["layers.1.mlp.up_proj.weight"][-1, -1] = value
    with pytest.raises(RefusedError, match=r"up_proj.* NaN or Inf"):
        engine(Settings(target, head.save(target.parent / f"with {value}, stored"), k=K))


def test_a_head_is_judged_by_its_own_load_format(target: Path, right: dict[str, list[int]], tmp_path: Path):
    """A dummy head drafts for a real target, whose answers stay; beside a dummy target a head is checked."""
    head = write_own(tmp_path / "head", target, CASES["aws"])
    settings = Settings(target, head, k=K, max_model_len=MAX_MODEL_LEN)
    dummy = engine(replace(settings, speculative=(("draft_load_config", {"load_format": "dummy"}),)))
    assert {req: done.tokens for req, done in dummy.run(ASKED).items()} == right
    mixed = (("draft_load_config", {"load_format": "auto"}),)
    live = engine(replace(settings, speculative=mixed, llm=(("load_format", "dummy"),)))
    live.drafter.model.mask_hidden.data.zero_()
    with pytest.raises(RefusedError, match="mask_hidden is all zeros"):
        check_loaded_head(live.drafter.model, live.drafter.vllm_config)


@pytest.mark.parametrize("fmt", ["vllm", "speculators"])
def test_a_text_has_no_positions_of_m_rope(fmt: str, target: Path, expected, right, tmp_path: Path):
    """A head whose config has it drafts as without."""
    head = read(tiny_heads.write_head(tmp_path / "plain", target, HeadSpec(fmt=fmt)))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    head.layer_config["rope_parameters"] = rope
    assert drafts(target, head.save(tmp_path / "head"), right) == expected(CASES["aws"])[1]
