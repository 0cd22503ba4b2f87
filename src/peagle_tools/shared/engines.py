"""vLLM engines of a pair, each in a fresh process, and the acceptance that they measure."""

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import Any

import psutil

from peagle_tools.shared import processes
from peagle_tools.shared.acceptance import Acceptance, read_engine
from peagle_tools.shared.errors import ToolError
from peagle_vllm.heads.files import HeadError, one_line

GROUP = 4  # prompts measured together: the standard error is over groups
KV_CACHE_BYTES = 2 << 30  # 16,384 tokens of an 8B target


def quick_dtype() -> str:
    """vLLM's bfloat16, but float32 on an x86 CPU without instructions for it, where bfloat16 is many times slower.

    Delete it when vLLM's CPU platform chooses so by itself (``CpuPlatform.supported_dtypes``).
    """
    import torch

    cpu = torch.cpu.get_capabilities()
    is_slow = cpu.get("architecture") == "x86_64" and not cpu.get("avx512_bf16") and not torch.cuda.is_available()
    return "float32" if is_slow else "bfloat16"


@dataclass(frozen=True)
class Pair:
    """What is served. ``arguments`` are more ones for ``vllm.LLM``."""

    target: str
    head: str
    arguments: dict[str, Any]

    @contextmanager
    def engine(self, num_k: int, prompts: list[list[int]], max_tokens: int) -> Iterator[Any]:
        """A ``vllm.LLM`` that ends with the block: its own processes would outlive this one's last line."""
        from vllm import LLM
        from vllm.platforms import current_platform

        gc.freeze()  # vLLM collects garbage seven times a start; its modules' million objects need not be scanned
        arguments: dict[str, Any] = {
            "model": self.target,
            "enforce_eager": True,  # hooks see nothing of a replayed graph
            "max_model_len": max(map(len, prompts)) + max_tokens + 2 * num_k,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "use_tqdm_on_load": False,
        }
        speculative = {"method": "eagle3", "model": self.head, "num_speculative_tokens": num_k}
        speculative |= {"parallel_drafting": True, "prompt_lookup_min": 0}  # the head's own drafts
        arguments |= {**self.arguments, "speculative_config": speculative}
        if current_platform.is_cpu() and not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & arguments.keys():
            # By default vLLM takes 92% of a CPU's memory, or does not start where other processes use some of it.
            arguments["kv_cache_memory_bytes"] = min(KV_CACHE_BYTES, psutil.virtual_memory().available // 2)
        llm = LLM(**arguments)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def in_process(task: Callable[..., Any], *args: Any) -> Any:
    """Run ``task`` in a fresh process, which gives its memory back at the end. ToolError where vLLM cannot run it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in that process
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # our own hooks go to vLLM's workers
    # Training has imported torch before vLLM: processes forked from here cannot use a GPU.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    context, ends = get_context("spawn"), processes.end_with_parent
    with ProcessPoolExecutor(1, mp_context=context, initializer=ends, initargs=(os.getpid(),)) as pool:
        try:
            return pool.submit(_with_errors_as_lines, task, *args).result()
        except BrokenProcessPool:
            raise ToolError("vLLM's process was killed, perhaps for its memory; run the command again") from None
        except Exception:  # the task has ended
            raise
        except BaseException:  # a signal: the pool would wait for the task's end
            for child in active_children():
                child.kill()
            raise


def _with_errors_as_lines(task: Callable[..., Any], *args: Any) -> Any:
    """What ``task`` returns; its errors as lines, since those of vLLM's configs cannot go to another process."""
    try:
        return task(*args)
    except (HeadError, ToolError):
        raise
    except Exception as error:
        raise cannot_run(error) from None


def cannot_run(error: Exception) -> ToolError:
    """What vLLM raised while a pair was served, as a line."""
    reason = one_line(error, 300)
    return ToolError(f"vLLM cannot run this pair ({reason}); serve the target alone first, then with this head")


def generate(llm: Any, prompts: list[list[int]], max_tokens: int, **sampling: Any) -> list[Any]:
    """vLLM's outputs for prompts of token ids; greedy, unless ``sampling`` says more."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def measure(pair: Pair, prompts: list[list[int]], num_k: int, max_tokens: int) -> list[Acceptance]:
    """Acceptance of each group of prompts, from vLLM's own counters."""
    seen = []
    with pair.engine(num_k, prompts, max_tokens) as llm:
        for at in range(0, len(prompts), GROUP):
            before = read_engine(llm)
            generate(llm, prompts[at : at + GROUP], max_tokens)
            seen.append(read_engine(llm).since(before))
    return seen
