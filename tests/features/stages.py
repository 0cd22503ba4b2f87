"""An engine of two pipeline stages on Model Runner V2: the last one's drafts are those of one process.

    PEAGLE_TEST_ARM=plugin-v2 python -m tests.features.stages FOLDER  # reads FOLDER/target and FOLDER/head

Each stage is a process that vLLM starts, and there this file is imported again, before vLLM.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.engines import Request, Settings, engine, prepare_process, shut_down
from tests.support.random_heads import VOCAB, prompt
from tests.support.recorder import Recording, compare, planter, record
from tests.support.reference import Reference
from tools.interpreter import torch_twins

K, MAX_MODEL_LEN = 4, 96
REQUESTS = [
    Request("decodes", prompt(9), 40),
    Request("short", prompt(9, 1), 4),
    Request("chunked", prompt(40, 2), 10, arrives=2),
]


def schedule_asynchronously() -> None:
    """As vLLM does by default, but not on a CPU: V2's stages exchange tokens at that scheduler's pace."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def begin(worker: Any, right: dict[str, list[int]]) -> bool:
    """Record and plant in this stage's process. Returns whether this stage drafts."""
    drafter = worker.model_runner.speculator
    if drafter is not None:
        worker.recording = record(SimpleNamespace(drafter=drafter), planter(right, VOCAB))  # type: ignore[arg-type]
        worker.noted = worker.recording.__enter__()
    return drafter is not None


def noted(worker: Any) -> Recording | None:
    return getattr(worker, "noted", None)


def main() -> None:
    target, head = Path(sys.argv[1]) / "target", Path(sys.argv[1]) / "head"
    prepare_process()
    schedule_asynchronously()
    stages = ("distributed_executor_backend", "mp"), ("pipeline_parallel_size", 2)
    live = engine(Settings(target, head, k=K, max_model_len=MAX_MODEL_LEN, token_budget=12, llm=stages))
    reference = Reference(target, head)
    right = {request.id: reference.greedy(request.prompt, request.max_tokens) for request in REQUESTS}
    assert live.llm.collective_rpc(begin, args=(right,)) == [False, True]
    finished = live.run(REQUESTS)
    report = compare(live.llm.collective_rpc(noted)[-1], finished, reference, live.settings)
    print(report)
    assert {req: done.tokens for req, done in finished.items()} == right
    assert report.rows > 12 and report.dropped["partial prefill"]
    shut_down()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a stage
    twins = torch_twins()
    twins.__enter__()
    prepare_process()
