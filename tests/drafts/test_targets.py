"""Drafts for targets of other architectures equal the reference, which gets the hidden states that vLLM captured."""

from pathlib import Path

import pytest

from tests import tiny_heads
from tests.conftest import ARM
from tests.drafts import targets
from tests.drafts.recorder import compare, planter, record
from tests.drafts.reference import Reference
from tests.engines import Request, Settings, engine

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

V2 = ARM == "plugin-v2"
SPLIT_ON_V1 = ("gpt_oss", "gemma4_text")  # of their four full layers and the head's two vLLM makes two groups

K, MAX_MODEL_LEN = 5, 160
# On both sides of a window, and across it.
LENGTHS = (5, 24, 90)
ANSWER = 12 if V2 else 24  # the interpreter takes a tenth of a second for a row


@pytest.mark.parametrize("name", [name for name in targets.CONFIGS if V2 or name not in SPLIT_ON_V1])
def test_drafts_for_a_target(name: str, tmp_path: Path) -> None:
    target = targets.write(tmp_path, name)
    head = tiny_heads.write_head(tmp_path / "head", target, tiny_heads.HeadSpec())
    asked = [Request(f"{n}", tiny_heads.prompt(n, seed=n), ANSWER) for n in LENGTHS]
    alone = engine(Settings(target, max_model_len=MAX_MODEL_LEN)).run(asked)
    right = {req: done.tokens for req, done in alone.items()}
    said = {token for tokens in right.values() for token in tokens[-ANSWER:]}
    assert len(said) > ANSWER, "a target that repeats itself"
    live = engine(Settings(target, head, k=K, max_model_len=MAX_MODEL_LEN))
    with record(live, planter(right, tiny_heads.VOCAB), keep_hidden=True) as noted:
        finished = live.run(asked)
    assert {req: done.tokens for req, done in finished.items()} == right
    report = compare(noted, finished, Reference(None, head), k=K, max_model_len=MAX_MODEL_LEN)
    print(f"{name}: {report}")
    assert report.rows > ANSWER and not report.ties


@pytest.mark.arm("plugin-v1")
@pytest.mark.parametrize("name", SPLIT_ON_V1)
def test_a_head_that_v1_cannot_group_is_refused(name: str, tmp_path: Path) -> None:
    from peagle_vllm.serving import RefusedError

    target = targets.write(tmp_path, name)
    head = tiny_heads.write_head(tmp_path / "head", target, tiny_heads.HeadSpec())
    with pytest.raises(RefusedError, match=r"splits the head's over KV cache groups.* use Model Runner V2"):
        engine(Settings(target, head, k=K, max_model_len=MAX_MODEL_LEN))
