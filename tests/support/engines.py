"""In-process vLLM engines for tests: start one, reuse it, look inside it.

An engine starts in about a second once vLLM is imported. Most of a normal start goes into garbage
collections over vLLM's million objects, so those are frozen first and collected never.
"""

import gc
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from peagle_vllm import lookup
from tests.conftest import ARM, HAS_GPU
from tests.support.dialects import edit

BLOCK_SIZE = 32  # the smallest block of vLLM's CPU attention


@dataclass(frozen=True)
class Settings:
    """What distinguishes one engine from another."""

    target: Path
    head: Path | None = None  # P-EAGLE head, or None for no speculation
    k: int = 5  # draft tokens a step
    max_num_seqs: int = 4
    max_model_len: int = 192
    token_budget: int = 512  # target rows a step; smaller than a prompt, it makes chunked prefill
    kv_blocks: int = 64  # KV blocks of BLOCK_SIZE tokens; too few for all requests, they make preemption
    prefix_caching: bool = False
    dtype: str = "float32"
    parallel_drafting: bool = True
    serve_head: bool = False  # give the head itself as the served model (speculators format only)
    lookup: int = 0  # tokens from which on drafts are looked up; 0: never; the default is left to the product
    speculative: tuple[tuple[str, Any], ...] = ()  # more entries for speculative_config
    llm: tuple[tuple[str, Any], ...] = ()  # more arguments for LLM

    def llm_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": str(self.target),
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "enforce_eager": True,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.token_budget,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": self.kv_blocks,
            "kv_cache_memory_bytes": 256 << 20,
            "enable_prefix_caching": self.prefix_caching,
        }
        if HAS_GPU:  # several processes share the device
            arguments["gpu_memory_utilization"] = 0.05
        if self.head is not None:
            # vLLM takes K-1 rows a request off the token budget; give them back, so that it means target rows.
            arguments["max_num_batched_tokens"] += (self.k - 1) * self.max_num_seqs
            speculative: dict[str, Any] = {"num_speculative_tokens": self.k, "method": "eagle3"}
            if self.serve_head:
                name_target_on_hub(self.head, self.target)
                arguments["model"] = str(self.head)
            else:
                speculative |= {"model": str(self.head), "parallel_drafting": self.parallel_drafting}
            if self.parallel_drafting and ARM != "stock-v1" and self.lookup != lookup.DEFAULT:
                speculative["prompt_lookup_min"] = self.lookup
            arguments["speculative_config"] = speculative | dict(self.speculative)
        return arguments | dict(self.llm)


def name_target_on_hub(head: Path, target: Path) -> None:
    """Put the target into the hub's cache and its name there into the head: vLLM 0.33 serves no head with a folder."""
    from huggingface_hub import constants

    name = hashlib.sha256(bytes(target)).hexdigest()[:40]
    cached = Path(constants.HF_HUB_CACHE) / f"models--tests--{name}"  # a folder of these tests: tests/conftest.py
    if not cached.exists():
        (cached / "refs").mkdir(parents=True)
        (cached / "refs/main").write_text(name)
        (cached / "snapshots").mkdir()
        (cached / "snapshots" / name).symlink_to(target.absolute())
    edit(head, lambda h: h.config["speculators_config"]["verifier"].update(name_or_path=f"tests/{name}"))


@dataclass(frozen=True)
class Request:
    """One request: its own id, prompt token ids, and the engine steps at which it arrives and may be aborted."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int = 0
    aborted: int | None = None
    sampling: tuple[tuple[str, Any], ...] = ()
    lora: Any = None  # vLLM's LoRARequest
    image: Any = None
    embeds: Any = None  # [len(prompt), hidden] tensor, of which the engine reads the rows ``embedded``, not the tokens
    embedded: tuple[bool, ...] = ()  # all rows where it is empty: then the engine knows no token

    def vllm_prompt(self) -> Any:
        prompt: dict[str, Any] = {"prompt_token_ids": list(self.prompt)}
        if self.image is not None:
            prompt["multi_modal_data"] = {"image": self.image}
        if self.embeds is None:
            return prompt
        known = prompt | {"prompt_is_token_ids": [not here for here in self.embedded]} if self.embedded else {}
        return {"prompt_embeds": self.embeds, **known}


@dataclass
class Finished:
    """A finished or aborted request: prompt and output as one token sequence."""

    request: Request
    output: list[int]
    num_cached_tokens: int
    raw: Any = field(repr=False, default=None)

    @property
    def tokens(self) -> list[int]:
        prompt = self.request.prompt if self.raw is None else self.raw.prompt_token_ids  # an image takes many tokens
        if self.request.embedded:
            prompt = [0 if here else t for t, here in zip(prompt, self.request.embedded, strict=True)]
        return [*prompt, *self.output]


class Engine:
    """A live LLM and what tests need from inside it."""

    def __init__(self, settings: Settings):
        from vllm import LLM

        self.settings = settings
        with asynchronous():
            self.llm = LLM(**settings.llm_arguments())
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler

    @property
    def worker(self) -> Any:
        return self.core.model_executor.driver_worker.worker

    @property
    def runner(self) -> Any:
        return self.worker.model_runner

    @property
    def drafter(self) -> Any:
        """V1's proposer or V2's speculator."""
        return self.runner.speculator if ARM == "plugin-v2" else self.runner.drafter

    def run(self, requests: Sequence[Request]) -> dict[str, Finished]:
        """Run requests to their end, each from the engine step at which it arrives. Greedy unless told."""
        from vllm import SamplingParams

        engine, finished = self.llm.llm_engine, {}
        step = 0
        came: dict[str, Any] = {}  # the last output of each request
        waiting = sorted(requests, key=lambda r: r.arrives)
        while waiting or engine.has_unfinished_requests():
            while waiting and (waiting[0].arrives <= step or not engine.has_unfinished_requests()):
                request = waiting.pop(0)
                sampling = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | dict(request.sampling)
                params = SamplingParams(max_tokens=request.max_tokens, **sampling)
                engine.add_request(request.id, request.vllm_prompt(), params, lora_request=request.lora)
            for request in requests:
                if request.aborted == step and request.id not in finished and request not in waiting:
                    engine.abort_request([request.id])
                    left = [req for req in self.scheduler.requests if req.startswith(f"{request.id}-")]
                    assert not left, f"{left} was aborted and is still scheduled"
                    finished[request.id] = _finished(request, came.get(request.id))
            for out in engine.step():
                came[out.request_id] = out
                if out.finished and out.request_id not in finished:
                    request = next(r for r in requests if r.id == out.request_id)
                    finished[request.id] = _finished(request, out)
            step += 1
        assert len(finished) == len(requests), "request ids must be unique"
        return finished


def _finished(request: Request, out: Any) -> Finished:
    """Of vLLM's last output, or of None where it was aborted before there was any."""
    if out is None:
        return Finished(request, [], 0)
    return Finished(request, list(out.outputs[0].token_ids), out.num_cached_tokens or 0, out)


@contextmanager
def asynchronous() -> Iterator[None]:
    """vLLM's CPU platform turns asynchronous scheduling off, which is the default elsewhere, and here."""
    from vllm.platforms import current_platform

    original = current_platform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        chosen = vllm_config.scheduler_config.async_scheduling
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = chosen

    with patch.object(current_platform, "check_and_update_config", check_and_update_config):
        yield


_live: Engine | None = None


def no_collection() -> AbstractContextManager[Any]:
    """vLLM collects garbage seven times a start; over its own modules that takes seconds and finds nothing."""
    return patch.object(gc, "collect", lambda *_: 0)


def shut_down() -> None:
    """End the live engine, if any."""
    global _live
    if _live is None:
        return
    with no_collection():
        # The client's shutdown also detaches its finalizer, which would tear down the *next* engine's groups.
        _live.llm.llm_engine.engine_core.shutdown()
    _live = None
    if HAS_GPU:  # vLLM keeps the pool of this engine's graphs for the next one; PyTorch refuses a pool that is unused
        from vllm.platforms import current_platform

        type(current_platform)._global_graph_pool = None


def prepare_process() -> None:
    """What must happen once, before the first engine of this process."""
    if not HAS_GPU:  # log probabilities and experts, compiled beside the model: half a minute, for the same numbers
        torch._dynamo.config.disable = True
    if ARM == "plugin-v2" and not HAS_GPU:
        from tools.interpreter import enable

        enable()
    if ARM != "stock-v1":
        from peagle_vllm import plugin

        plugin.register()  # idempotent: an installed distribution registers through its entry point too
    if ARM == "plugin-v2" and not HAS_GPU:
        from vllm.v1.sample.ops import topk_topp_sampler

        topk_topp_sampler.HAS_TRITON = False  # the interpreter does not run vLLM's kernel for top-k and top-p


def engine(settings: Settings) -> Engine:
    """The live engine if it has these settings, else a new one in its place."""
    global _live
    if _live is not None and _live.settings == settings:
        return _live
    shut_down()
    prepare_process()
    import vllm  # noqa: F401  (before the freeze, so that its objects are never scanned again)
    from vllm.utils import gpu_sync_debug

    gpu_sync_debug._sync_check_enabled = False  # vLLM turns it on after a warm-up, which may wait for the GPU
    gc.freeze()
    with no_collection():
        try:
            _live = Engine(settings)
        except Exception:
            from vllm.distributed import destroy_model_parallel

            destroy_model_parallel()  # groups of an engine that did not start may not suit the next one
            raise
    return _live


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Engines meanwhile have these variables, those of vLLM too, which remembers what it read in os.environ."""

    def forget() -> None:
        if "vllm.envs" in sys.modules:
            sys.modules["vllm.envs"].disable_envs_cache()

    with patch.dict(os.environ, variables):
        forget()
        try:
            yield
        finally:
            forget()


def without_speculation(settings: Settings, requests: Sequence[Request]) -> dict[str, Finished]:
    """What the target alone answers, on every arm from V1, which needs no interpreter."""
    with environment(VLLM_USE_V2_MODEL_RUNNER="0"):
        return engine(replace(settings, head=None)).run(requests)
