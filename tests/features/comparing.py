"""Run requests with and without speculation, and expect the same."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.support.engines import Settings, engine, on_v1
from tests.support.models import PEAGLE, TARGET, prompt_token_ids

K = 5
SETTINGS = Settings(TARGET, PEAGLE, k=K, max_num_seqs=4, llm=(("skip_tokenizer_init", False),))


@dataclass(frozen=True)
class Case:
    """One request of a feature test: which prompt, how long, and its sampling parameters."""

    prompt: int = 0
    max_tokens: int = 24
    sampling: tuple[tuple[str, Any], ...] = ()


def outputs(settings: Settings, cases: Sequence[Case], **more: Any) -> list[Any]:
    """vLLM's RequestOutput for each case, all submitted together. Greedy, and past the end of text, unless told.

    Args:
        more: of ``LLM.generate``'s arguments.
    """
    live = engine(settings)  # before vLLM is imported: on V2 it must find Triton's interpreter
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=prompt_token_ids()[case.prompt]) for case in cases]
    params = [
        SamplingParams(max_tokens=case.max_tokens, **({"temperature": 0.0, "ignore_eos": True} | dict(case.sampling)))
        for case in cases
    ]
    return live.llm.generate(prompts, params, use_tqdm=False, **more)


def both(settings: Settings, cases: Sequence[Case]) -> list[tuple[Any, Any]]:
    """(unspeculated, speculated) RequestOutput for each case."""
    with on_v1():
        plain = outputs(replace(settings, head=None), cases)
    return list(zip(plain, outputs(settings, cases), strict=True))


def texts(output: Any) -> list[str]:
    return [completion.text for completion in output.outputs]


def tokens(output: Any) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]
