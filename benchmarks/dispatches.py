"""What one draft step asks of the host: ``python -m benchmarks.dispatches [--out FILE]``. Needs no GPU.

Counts, in one ``propose()`` of a decode batch and outside the drafter's forward, the tensor operations that PyTorch
dispatches (a ``TorchDispatchMode`` sees them; views and allocations apart) and the Triton launches. On a GPU each is
a launch or more. Every arm runs in a process of its own on the tiny models; V2 runs under Triton's interpreter.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
K, REQUESTS = 5, 4
ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
HEADS = {"full": "tiny-llama-peagle", "reduced": "tiny-llama-peagle-d2t"}

# arm -> (its head's draft vocabulary, its environment, its speculative_config)
PARALLEL: dict[str, Any] = {"parallel_drafting": True}
V1, V2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
ARMS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "stock V1": (HEADS["full"], V1 | {"PEAGLE_VLLM_DISABLE": "1"}, PARALLEL),
    "stock V1, reduced vocabulary": (HEADS["reduced"], V1 | {"PEAGLE_VLLM_DISABLE": "1"}, PARALLEL),
    "plugin V1": (HEADS["full"], V1, PARALLEL),
    "plugin V1, reduced vocabulary": (HEADS["reduced"], V1, PARALLEL),
    "plugin V2": (HEADS["full"], V2, PARALLEL),
    "plugin V2, reduced vocabulary": (HEADS["reduced"], V2, PARALLEL),
    "EAGLE-3 V2": ("tiny-llama-eagle3", V2, {}),
}


class Counting(TorchDispatchMode):
    """Counts dispatched operations by name while ``on``."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.seen = False, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on and not _is_view(func) and func.name().split(".")[0] not in ALLOCATIONS:
            self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


@contextmanager
def counted(drafter: Any) -> Iterator[list[dict[str, Any]]]:
    """One entry for each ``propose()`` of a full decode batch: its operations by name and its launches."""
    import vllm.utils.torch_utils as torch_utils
    from triton.runtime import interpreter

    steps: list[dict[str, Any]] = []
    mode, launches = Counting(), Counter[str]()
    propose, forward, execute = drafter.propose, drafter.model.forward, interpreter.GridExecutor.__call__
    to_device = torch_utils.async_tensor_h2d

    def quiet_forward(*args: Any, **kwargs: Any) -> Any:
        before, mode.on = mode.on, False
        try:
            return forward(*args, **kwargs)
        finally:
            mode.on = before

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, mode.on = mode.on, False
        if before:
            launches[self.fn.__name__] += 1
        try:
            return execute(self, *args, **kwargs)
        finally:
            mode.on = before

    def counting_propose(*args: Any, **kwargs: Any) -> Any:
        mode.seen.clear(), launches.clear()
        with mode:
            mode.on = True
            drafts = propose(*args, **kwargs)
            mode.on = False
        steps.append({"requests": len(drafts), "operations": dict(mode.seen), "launches": dict(launches)})
        return drafts

    drafter.propose, drafter.model.forward = counting_propose, quiet_forward
    interpreter.GridExecutor.__call__ = launch
    try:
        yield steps
    finally:
        del drafter.propose
        drafter.model.forward = forward
        interpreter.GridExecutor.__call__ = execute
        assert torch_utils.async_tensor_h2d is to_device


def run_arm(name: str) -> dict[str, Any]:
    """Serve REQUESTS requests in this process and count one decode step's draft."""
    head, env, speculative = ARMS[name]
    if env.get("TRITON_INTERPRET"):
        from tests.interpreter import enable

        enable()
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        str(ROOT / "models/tiny-llama"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        speculative_config={"method": "eagle3", "model": str(ROOT / "models" / head), "num_speculative_tokens": K}
        | speculative,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter = runner.speculator if env["VLLM_USE_V2_MODEL_RUNNER"] == "1" else runner.drafter
    prompts = [TokensPrompt(prompt_token_ids=[17 + i, 40, 41, 42, 43]) for i in range(REQUESTS)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    with counted(drafter) as steps:
        llm.generate(prompts, params, use_tqdm=False)
    decodes = [step for step in steps[1:] if step["requests"] == REQUESTS]  # the first is the prefill
    assert decodes, "no decode step with every request in it"
    step = max(decodes, key=lambda step: sum(step["operations"].values()))  # the worst of them
    totals = {kind: sum(step[kind].values()) for kind in ("operations", "launches")}
    return {"arm": name, "steps_seen": len(decodes), "totals": totals, **step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--arm", choices=ARMS, help="this arm alone, in this process")
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(run_arm(args.arm)))
        return
    results = []
    for name, (_, env, _) in ARMS.items():
        common = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        command = [sys.executable, "-m", "benchmarks.dispatches", "--arm", name]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | common | env, capture_output=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        counts = results[-1]["totals"]
        print(f"{name:32} {counts['operations']:3} tensor operations + {counts['launches']:2} Triton launches")
    if args.out:
        report = {"what": __doc__.splitlines()[0], "k": K, "requests": REQUESTS, **provenance(), "arms": results}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
