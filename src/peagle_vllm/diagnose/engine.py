"""Measuring a setup in vLLM: one engine for each head and K, prompts greedily, acceptance from vLLM's own counters."""

import dataclasses
import functools
import gc
import os
import tempfile
from pathlib import Path
from typing import Any, Self

from peagle_vllm.acceptance import Acceptance, read_engine
from peagle_vllm.diagnose.interventions import Setup
from peagle_vllm.diagnose.prompts import Messages
from peagle_vllm.heads.convert import config_for, write_json
from peagle_vllm.heads.files import EDGE, INDEX
from peagle_vllm.heads.head import Head


class VllmMeasure:
    """Runs setups of one pair. A context manager: its end shuts the engine down.

    Args:
        conversations: each prompt as chat messages.
        max_tokens: the longest answer to each prompt.
        llm: more arguments for ``vllm.LLM``.
    """

    def __init__(self, target: str, head: Head, conversations: list[Messages], max_tokens: int, llm: dict[str, Any]):
        self.target, self.head, self.conversations, self.max_tokens = target, head, conversations, max_tokens
        self.llm_arguments = llm
        self._live: tuple[tuple, Any] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="peagle-diagnose-")

    def __enter__(self) -> Self:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from peagle_vllm import plugin

        plugin.register()  # idempotent; an installed package is registered through its entry point too
        return self

    def __exit__(self, *_: object) -> None:
        self._shut_down()
        self._folder.cleanup()

    def __call__(self, setup: Setup) -> Acceptance:
        from vllm import SamplingParams

        llm = self._engine(setup)
        prompts = [{"prompt_token_ids": ids} for ids in self.prompt_ids(setup)]
        before = read_engine(llm)
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=self.max_tokens), use_tqdm=False)
        return read_engine(llm).since(before)

    def prompt_ids(self, setup: Setup) -> list[list[int]]:
        """Token ids of every prompt under this setup."""
        prompts = []
        for messages in self.conversations:
            if setup.chat_template:
                ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            else:
                ids = self.tokenizer.encode("\n".join(message["content"] for message in messages))
            prompts.append(ids[-setup.prompt_tokens :] if setup.prompt_tokens else ids)
        return prompts

    @functools.cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.target)

    def _engine(self, setup: Setup) -> Any:
        key = (setup.aux_layers, setup.mask_token_id, setup.k)
        if self._live is not None and self._live[0] == key:
            return self._live[1]
        self._shut_down()
        from vllm import LLM

        gc.freeze()  # vLLM collects garbage seven times a start; its modules' million objects need not be scanned
        longest = max(len(ids) for ids in self.prompt_ids(dataclasses.replace(setup, prompt_tokens=None)))
        arguments: dict[str, Any] = {
            "model": self.target,
            "enforce_eager": True,  # graphs change the time to start, not acceptance
            "max_model_len": longest + self.max_tokens + 2 * setup.k + 64,
            "enable_prefix_caching": False,
            "disable_log_stats": False,  # they are what is read
            "seed": 0,
            "use_tqdm_on_load": False,
        }
        speculative = {
            "method": "eagle3",
            "model": str(self._variant(setup)),
            "num_speculative_tokens": setup.k,
            "parallel_drafting": True,
        }
        llm = LLM(**arguments | self.llm_arguments, speculative_config=speculative)
        self._live = key, llm
        return llm

    def _variant(self, setup: Setup) -> Path:
        """A folder with the head's weights, linked, and a config that names the setup's layers and mask token."""
        assert self.head.folder is not None
        folder = Path(self._folder.name) / "-".join(map(str, (setup.mask_token_id, *setup.aux_layers)))
        if folder.exists():
            return folder
        folder.mkdir()
        varied = dataclasses.replace(
            self.head, aux_layer_ids=setup.aux_layers, mask_token_id=setup.mask_token_id, mask_token_key="mask_token_id"
        )
        write_json(folder / "config.json", config_for(varied, "vllm", None))
        files = {info.file for info in self.head.tensors.values()}
        for file in (*files, INDEX, EDGE):
            source = self.head.folder / file
            if source.exists():
                (folder / file).symlink_to(source.resolve())
        return folder

    def _shut_down(self) -> None:
        if self._live is not None:
            self._live[1].llm_engine.engine_core.shutdown()
            self._live = None
