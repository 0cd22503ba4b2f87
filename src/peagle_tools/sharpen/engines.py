"""vLLM engines of a pair, each in a process of its own: one records, others measure."""

import copy
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch

from peagle_tools.shared.acceptance import Acceptance, read_engine
from peagle_tools.sharpen import record
from peagle_tools.sharpen.trace import CandidateTrace
from peagle_vllm.heads.files import HeadError, one_line
from peagle_vllm.serving import kv_bytes_per_token

SHARD = 128  # prompts
GO_ON = "make room and start again, which goes on from there"
STEP = 2  # tokens of a given answer between drafts, which know at least so many
OTHERS = 0.2  # of an answer's tokens: text may become other tokens than those that the target said
GROUP = 4  # prompts measured together: the standard error is over groups


@dataclass(frozen=True)
class Pair:
    """What is served. ``arguments`` are more ones for ``vllm.LLM``."""

    target: str
    head: str
    arguments: dict[str, Any]

    @contextmanager
    def engine(self, num_k: int, longest: int, num_reqs: int) -> Iterator[Any]:
        """A ``vllm.LLM`` that ends with the block: its own processes would outlive this one's last line.

        Args:
            longest: prompt and answer, in tokens.
            num_reqs: requests that run at once.
        """
        from vllm import LLM
        from vllm.platforms import current_platform

        gc.freeze()  # vLLM collects garbage seven times a start; its modules' million objects need not be scanned
        arguments: dict[str, Any] = {
            "model": self.target,
            "enforce_eager": True,  # hooks see nothing of a replayed graph
            "max_model_len": longest + 2 * num_k,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "seed": 0,
            "use_tqdm_on_load": False,
        }
        speculative = {"method": "eagle3", "model": self.head, "num_speculative_tokens": num_k}
        arguments |= {**self.arguments, "speculative_config": speculative | {"parallel_drafting": True}}
        if current_platform.is_cpu() and not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & arguments.keys():
            arguments["kv_cache_memory_bytes"] = kv_cache_bytes(arguments, num_reqs)
        llm = LLM(**arguments)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def kv_cache_bytes(arguments: dict[str, Any], num_reqs: int) -> int:
    """KV cache for so many requests of max_model_len tokens, or half of the memory that is free.

    By default vLLM takes 92% of a CPU's memory, or does not start where other processes use some of it.
    """
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(**copy.deepcopy(arguments)).create_engine_config()
    spec, cache = config.speculative_config, config.cache_config
    assert spec is not None
    a_token = kv_bytes_per_token(config.model_config, config.parallel_config, cache.cache_dtype)
    a_token += kv_bytes_per_token(spec.draft_model_config, spec.draft_parallel_config, cache.cache_dtype)
    blocks = -(-config.model_config.max_model_len // cache.block_size)  # of a request; vLLM keeps one more for itself
    num_reqs = min(num_reqs, config.scheduler_config.max_num_seqs)
    return min((num_reqs * blocks + 1) * cache.block_size * a_token, psutil.virtual_memory().available // 2)


def in_process(task: Callable[..., Any], *args: Any) -> Any:
    """Run ``task`` in a fresh process, which gives its memory back at the end.

    Raises:
        HeadError: vLLM cannot run it; one line.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in that process
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # our own hooks go to vLLM's workers
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(task, *args).result()
        except BrokenProcessPool:
            raise HeadError("vLLM's process was killed; what is recorded stays, start again to go on") from None
        except HeadError:
            raise
        except Exception as error:
            raise HeadError(f"vLLM cannot run this pair ({one_line(error, 300)}); serve it alone first") from None


def shards(prompts: list[list[int]], folder: Path) -> list[tuple[Path, list[tuple[int, list[int]]]]]:
    """(file, (number of the prompt, its token ids) ...) of each shard."""
    numbered = list(enumerate(prompts))
    groups = [numbered[at : at + SHARD] for at in range(0, len(numbered), SHARD)]
    return [(folder / f"{number:05}.safetensors", group) for number, group in enumerate(groups)]


def record_all(
    pair: Pair,
    prompts: list[list[int]],
    answers: list[list[int]] | None,
    folder: Path,
    num_k: int,
    num_candidates: int,
    max_tokens: int,
) -> None:
    """Let the target answer, and write a trace for each shard that is not there yet.

    Args:
        answers: to each prompt. They are read like prompts, STEP tokens at a time: a request drafts once a step.
            None: the target answers.

    Raises:
        HeadError: an answer is not the target's.
    """
    from vllm import SamplingParams

    texts = [[*p, *a] for p, a in zip(prompts, answers, strict=True)] if answers else prompts
    wanted = [(file, group) for file, group in shards(texts, folder) if not CandidateTrace.is_whole(file)]
    if not wanted:
        return
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    if answers:
        greedy = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        pair = replace(pair, arguments={"long_prefill_token_threshold": STEP} | pair.arguments)
    with pair.engine(num_k, max(map(len, texts)) + max_tokens, SHARD) as llm:
        llm.collective_rpc(record.start, args=(num_candidates,))
        for file, group in wanted:
            outputs = llm.generate([{"prompt_token_ids": ids} for _, ids in group], greedy, use_tqdm=False)
            said = {}
            for output, (number, ids) in zip(outputs, group, strict=True):
                num_prompt = len(prompts[number])
                if answers:
                    _refuse_another(llm, output, num_prompt)
                said[output.request_id] = number, [*ids, *output.outputs[0].token_ids], num_prompt
            trace = record.trace_of([rows for of_worker in llm.collective_rpc(record.take) for rows in of_worker], said)
            try:
                trace._replace(hidden=trace.hidden.to(torch.bfloat16)).save(file)
            except OSError as error:
                raise HeadError(f"{file} cannot be written ({error.strerror}); {GO_ON}") from None


def _refuse_another(llm: Any, output: Any, num_prompt: int) -> None:
    """HeadError where an answer is not the target's."""
    answer = output.prompt_token_ids[num_prompt:]
    best = [of[token].rank == 1 for of, token in zip(output.prompt_logprobs[num_prompt:], answer, strict=True)]
    others = best.count(False)
    if others > max(2, OTHERS * len(answer)):
        raise HeadError(
            f"the answer that begins with {llm.get_tokenizer().decode(answer[:16])!r} is not this target's, which "
            f"greedily says another token at {others / len(answer):.0%} of its {len(answer)} (up to {OTHERS:.0%} may "
            "be); remove that row, or give prompts without answers, and no --answered"
        )


def measure(pair: Pair, prompts: list[list[int]], num_k: int, max_tokens: int) -> list[Acceptance]:
    """Acceptance of each group of prompts, from vLLM's own counters."""
    from vllm import SamplingParams

    greedy, seen = SamplingParams(temperature=0.0, max_tokens=max_tokens), []
    with pair.engine(num_k, max(map(len, prompts)) + max_tokens, GROUP) as llm:
        for at in range(0, len(prompts), GROUP):
            before = read_engine(llm)
            group = [{"prompt_token_ids": ids} for ids in prompts[at : at + GROUP]]
            llm.generate(group, greedy, use_tqdm=False)
            seen.append(read_engine(llm).since(before))
    return seen
