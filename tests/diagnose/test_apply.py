"""Changes that ``diagnose`` makes in a running engine: each is felt by the drafts, and leaves nothing behind."""

from dataclasses import replace
from typing import Any

import pytest

from peagle_tools.diagnose.engine import apply
from peagle_tools.diagnose.interventions import Setup, setup_of
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import read_target
from tests.conftest import ARM
from tests.support.engines import Request, Settings, engine
from tests.support.models import PEAGLE, TARGET, prompt_token_ids
from tests.support.recorder import record

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")
if ARM == "plugin-v2":  # two minutes under the interpreter
    pytestmark = [pytestmark, pytest.mark.full]

CHANGES: dict[str, dict[str, Any]] = {
    "aux layers": {"aux_layers": (1, 4, 6)},
    "mask token": {"mask_token_id": 300},
    "norm_before_residual": {"norm_before_residual": True},
    "rope": {"rope": {"rope_theta": 100.0, "rope_type": "default"}},
}
MAX_TOKENS = 4 if ARM == "plugin-v2" else 16  # the interpreter takes a tenth of a second for a row


def test_each_change_moves_the_drafts_and_is_undone():
    live = engine(Settings(TARGET, PEAGLE))
    prompt = tuple(prompt_token_ids()[0][:24])

    def drafts(setup: Setup) -> list[tuple[int, ...]]:
        apply(live.core.model_executor.driver_worker.worker, setup)
        with record(live) as noted:
            live.run([Request("a", prompt, MAX_TOKENS)])
        return [row.draft for row in noted.rows]

    setup = setup_of(read_head(PEAGLE), read_target(str(TARGET)), live.settings.k)
    as_loaded = drafts(setup)
    for name, change in CHANGES.items():
        assert drafts(replace(setup, **change)) != as_loaded, name
        assert drafts(setup) == as_loaded, f"{name} was not undone"
