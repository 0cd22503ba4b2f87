"""A vLLM plugin for tests: writes every draft, and what the target then sampled, to the file $DRAFT_LOG.

It looks at the V1 runner from outside, so it knows nothing of the counters that reports are made from.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wrapt

RUNNER = "vllm.v1.worker.gpu_model_runner"


def install(folder: Path) -> None:
    """Make ``folder`` hold an installed distribution whose entry point is this plugin; it belongs on PYTHONPATH."""
    info = folder / "draft_recorder-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: draft-recorder\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\ndraft_recorder = {__name__}:register\n")


def register() -> None:
    wrapt.register_post_import_hook(_wrap, RUNNER)


def _wrap(module: Any) -> None:
    original = module.GPUModelRunner.propose_draft_token_ids

    def propose_draft_token_ids(self: Any, scheduler_output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(self, scheduler_output, sampled, *args, **kwargs)
        rows = []
        for req, tokens, draft in zip(self.input_batch.req_ids, _lists(sampled), _lists(drafts), strict=True):
            scheduled = len(scheduler_output.scheduled_spec_decode_tokens.get(req, ()))
            rows.append([req, scheduled, [t for t in tokens if t >= 0], draft])
        with open(os.environ["DRAFT_LOG"], "a") as log:  # noqa: PTH123
            log.write(json.dumps(rows) + "\n")
        return drafts

    module.GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids


def _lists(tokens: Any) -> list[list[int]]:
    return tokens if isinstance(tokens, list) else tokens.tolist()


@dataclass
class Counted:
    """Counts of one cell, from tokens alone."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)


def count(log: Path, prefix: str, k: int, output_lens: list[int]) -> Counted:
    """Compare every draft with what the target sampled next, for the requests whose id holds ``prefix``.

    ``output_lens`` are the lengths of the answers: what a runner does for a request that has ended counts nowhere.
    """
    found = Counted(by_position=[0] * k)
    drafted: dict[str, list[int]] = {}
    emitted: dict[str, int] = {}
    for req, scheduled, sampled, draft in _rows(log, prefix):
        index = int(req.split(prefix)[1].split("-")[0])
        if emitted.get(req, 0) >= output_lens[index]:
            continue
        if scheduled:
            accepted = 0
            for wanted, got in zip(drafted[req][:scheduled], sampled, strict=False):
                if wanted != got:
                    break
                accepted += 1
            assert len(sampled) == accepted + 1, f"{req}: drafted {drafted[req]}, then sampled {sampled}"
            found.drafts += 1
            found.draft_tokens += scheduled
            found.accepted += accepted
            for i in range(accepted):
                found.by_position[i] += 1
        drafted[req] = draft
        emitted[req] = emitted.get(req, 0) + len(sampled)
    return found


def _rows(log: Path, prefix: str) -> Iterator[list[Any]]:
    for line in log.read_text().splitlines():
        yield from (row for row in json.loads(line) if prefix in row[0])
