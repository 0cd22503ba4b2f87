"""How many KV cache groups a head makes of its target's."""

from pathlib import Path

import pytest

from tests.drafts import targets
from tests.drafts.targets import WINDOW
from tests.support.engines import Engine, Request, Settings, engine
from tests.support.random_heads import HeadSpec, prompt, write_head, write_pair
from tests.support.recorder import serve_exactly
from tests.support.reference import Reference

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")


def groups(live: Engine) -> int:
    return len(live.scheduler.kv_cache_config.kv_cache_groups)


def test_a_windowed_head_makes_no_groups(tmp_path: Path):
    target, head = write_pair(tmp_path, HeadSpec(windows=(8, 8)))
    live, reference = engine(Settings(target, head, k=3, max_model_len=96)), Reference(target, head)
    assert groups(live) == 1
    report, _ = serve_exactly(live, [Request("a", prompt(30), 12), Request("b", prompt(9, 1), 12)], reference)
    assert report.rows > 6


def test_a_head_with_its_targets_window_joins_its_groups(tmp_path: Path):
    target = targets.write(tmp_path, "mistral")
    head = write_head(tmp_path / "head", target, HeadSpec(windows=(WINDOW,) * 2))
    assert groups(engine(Settings(target, head, k=3, max_model_len=96))) == 1
