"""A head is data: no code that lies beside it is run, and nothing is unpickled."""

from pathlib import Path

import pytest

from tests.patches.refusals.configuring import configure, edit_config, refusal
from tests.support import random_heads as tiny_heads
from tests.support.random_heads import HeadSpec

pytestmark = pytest.mark.arm("plugin-v1")

CODE = """
from pathlib import Path
from transformers import LlamaConfig
Path({ran!r}).touch()
class Own(LlamaConfig):
    pass
"""


@pytest.mark.parametrize("fmt", ["aws", "speculators"])
@pytest.mark.parametrize("trusted", [False, True])
def test_code_beside_a_head_is_not_run(fmt: str, trusted: bool, target: Path, tmp_path: Path):
    """Not where the target's code is trusted either: vLLM would give that trust to the head."""
    head = tiny_heads.write_head(tmp_path / fmt, target, HeadSpec(fmt=fmt))
    (head / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    edit_config(head, lambda c: c.update(auto_map={"AutoConfig": "own.Own", "AutoModel": "own.Own"}))
    config = configure(target, head, engine_trust_remote_code=trusted)
    assert config.model_config.trust_remote_code is trusted
    assert config.speculative_config.draft_model_config.trust_remote_code is False
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "model.pt"])
def test_pickled_weights_are_refused(name: str, target: Path, head: Path):
    (head / "model.safetensors").rename(head / name)
    assert f"no *.safetensors: {head}; pickled weights are never read" in refusal(target, head)
