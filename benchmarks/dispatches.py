"""What one draft step asks of the host: ``python -m benchmarks.dispatches [--out FILE]``. Needs no GPU.

Counts, in one ``propose()`` of a decode batch and outside the drafter's forward, the tensor operations that PyTorch
dispatches (a ``TorchDispatchMode`` sees them; views and allocations apart) and the Triton launches. On a GPU each is
a launch or more. Every arm runs in a process of its own on the tiny models; the plugin's run under Triton's
interpreter, so that they launch what they launch on a GPU. V2 is counted again with FULL graphs whose replay does
nothing (``stand_ins``): what is left is what a GPU's host does, and the replays.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import arms
from benchmarks.arms import STOCK, V1
from benchmarks.stand_ins import Graph, give_graphs
from peagle_vllm.provenance import provenance

K, REQUESTS = 5, 4
ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
HEADS = {"full": "tiny-llama-peagle", "reduced": "tiny-llama-peagle-d2t"}

# arm -> (its head's draft vocabulary, its environment, its speculative_config)
PARALLEL: dict[str, Any] = {"parallel_drafting": True}
# Also where there is a GPU. On a CPU V1 would run the kernels' twins: other operations than a GPU's.
INTERPRETER = {"TRITON_INTERPRET": "1"}
V2 = arms.V2 | INTERPRETER
ARMS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "stock V1": (HEADS["full"], V1 | STOCK, PARALLEL),
    "stock V1, reduced vocabulary": (HEADS["reduced"], V1 | STOCK, PARALLEL),
    "plugin V1": (HEADS["full"], V1 | INTERPRETER, PARALLEL),
    "plugin V1, reduced vocabulary": (HEADS["reduced"], V1 | INTERPRETER, PARALLEL),
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


def _has(module: Any, name: str, value: Any) -> bool:
    return getattr(module, "__dict__", {}).get(name) is value


@contextmanager
def counted(drafter: Any) -> Iterator[list[dict[str, Any]]]:
    """One entry for each ``propose()`` of a full decode batch: its operations by name and its launches."""
    from triton.runtime import interpreter
    from vllm.utils.torch_utils import async_tensor_h2d

    steps: list[dict[str, Any]] = []
    mode, launches, copies = Counting(), Counter[str](), Counter[str]()
    propose, forward, execute = drafter.propose, drafter.model.forward, interpreter.GridExecutor.__call__
    # vLLM's one way to the device, where it was imported by value.
    ways = [module for module in list(sys.modules.values()) if _has(module, "async_tensor_h2d", async_tensor_h2d)]

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

    def to_device(*args: Any, **kwargs: Any) -> Any:
        if mode.on:
            copies["async_tensor_h2d"] += 1
        return async_tensor_h2d(*args, **kwargs)

    def counting_propose(*args: Any, **kwargs: Any) -> Any:
        mode.seen.clear(), launches.clear(), copies.clear()
        replays = Graph.replays
        with mode:
            mode.on = True
            drafts = propose(*args, **kwargs)
            mode.on = False
        seen = {"operations": dict(mode.seen), "launches": dict(launches), "host_to_device": dict(copies)}
        steps.append({"requests": len(drafts), **seen, "replays": Graph.replays - replays})
        return drafts

    drafter.propose, drafter.model.forward = counting_propose, quiet_forward
    interpreter.GridExecutor.__call__ = launch
    for module in ways:
        module.async_tensor_h2d = to_device
    try:
        yield steps
    finally:
        del drafter.propose
        drafter.model.forward = forward
        interpreter.GridExecutor.__call__ = execute
        for module in ways:
            module.async_tensor_h2d = async_tensor_h2d


def run_arm(name: str) -> dict[str, Any]:
    """Serve REQUESTS requests in this process and count one decode step's draft."""
    head, env, speculative = ARMS[name]
    arms.prepare_process()
    llm = arms.tiny_llm(REQUESTS, 512, head, {"num_speculative_tokens": K} | speculative)
    try:
        result = {"arm": name, **count_steps(llm)}
        if env.items() >= V2.items():
            give_graphs(arms.inside(llm)[1], range(1, REQUESTS + 1), K)
            result["replayed"] = count_steps(llm)
        return result
    finally:
        llm.llm_engine.engine_core.shutdown()  # for the next arm of this process


def count_steps(llm: Any) -> dict[str, Any]:
    """The decode step that dispatched the most."""
    from vllm import SamplingParams, TokensPrompt

    _, drafter = arms.inside(llm)
    prompts = [TokensPrompt(prompt_token_ids=[17 + i, 40, 41, 42, 43]) for i in range(REQUESTS)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    with counted(drafter) as steps:
        llm.generate(prompts, params, use_tqdm=False)
    decodes = [step for step in steps[1:] if step["requests"] == REQUESTS]  # the first is the prefill
    assert decodes, "no decode step with every request in it"
    step = max(decodes, key=lambda step: sum(step["operations"].values()))  # the worst of them
    totals = {kind: sum(step[kind].values()) for kind in ("operations", "launches", "host_to_device")}
    totals["replays"] = step.pop("replays")
    return {"steps_seen": len(decodes), "totals": totals, **step}


def runs(result: dict[str, Any]) -> list[tuple[str, dict[str, int]]]:
    """An arm's totals by what a table calls them, with graphs after without."""
    without = [(result["arm"], result["totals"])]
    return [*without, (f"{result['arm']}, replayed", result["replayed"]["totals"])] if "replayed" in result else without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS), help="these alone")
    parser.add_argument("--here", choices=ARMS, nargs="+", help=argparse.SUPPRESS)  # in this process, which fits them
    args = parser.parse_args()
    if args.here:
        arms.hand_over([run_arm(name) for name in args.here])
        return
    results = []
    for name in args.arms:
        results += arms.run("benchmarks.dispatches", ["--here", name], ARMS[name][1])
        for what, counts in runs(results[-1]):
            replays = f" + {counts['replays']} graph replays" if counts["replays"] else ""
            print(f"{what:40} {counts['operations']:3} operations + {counts['launches']:2} Triton launches{replays}")
    arms.write_result(args.out, __doc__, {"k": K, "requests": REQUESTS, **provenance(), "arms": results})


if __name__ == "__main__":
    main()
