"""Bad P-EAGLE configurations are refused in one line, before any weight is loaded."""

import functools
import logging
from types import ModuleType
from typing import TYPE_CHECKING

import peagle_vllm.seams as seams
from peagle_vllm.core.config import RefusedError, is_peagle
from peagle_vllm.core.pair import Problem, Target, check_pair
from peagle_vllm.heads.reader import HeadError, locate, read_head
from peagle_vllm.seams.ledger import Seam, Touch
from peagle_vllm.seams.patching import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.peagle")  # under vLLM's own handler

SEAM = Seam(
    name="validation",
    runner="both",
    why="vLLM serves heads with a zero, NaN or misread mask_hidden in silence, and dies of others with an error "
    "about something else.",
    waits_for="the same checks in vLLM's SpeculativeConfig",
    delete_when="vLLM refuses the heads of tests/heads by itself",
    touches=(
        Touch("vllm.config.vllm", "VllmConfig.__post_init__", "wrapped", "signature"),
        Touch("vllm.config.speculative", "SpeculativeConfig.method", "called", "signature"),
        Touch("vllm.config.speculative", "SpeculativeConfig.parallel_drafting", "called", "signature"),
        Touch("vllm.config.speculative", "SpeculativeConfig.num_speculative_tokens", "called", "signature"),
        Touch("vllm.config.speculative", "SpeculativeConfig.draft_model_config", "called", "signature"),
        Touch("vllm.config.parallel", "ParallelConfig.prefill_context_parallel_size", "called", "signature"),
        Touch("vllm.config.parallel", "ParallelConfig.decode_context_parallel_size", "called", "signature"),
    ),
)


def install(module: ModuleType) -> None:
    def make(original):
        def __post_init__(self, *args, **kwargs):
            original(self, *args, **kwargs)
            validate(self)

        return __post_init__

    wrap(module.VllmConfig, "__post_init__", make)


def validate(vllm_config: "VllmConfig") -> None:
    """Refuse (``RefusedError``, one line) or warn. Configurations without EAGLE-3 pass untouched."""
    spec = vllm_config.speculative_config
    if spec is None or spec.method != "eagle3" or spec.draft_model_config is None or vllm_config.model_config is None:
        return
    if is_peagle(vllm_config):
        seams.refuse_if_moved()
        _check_parallelism(vllm_config)
    model_config = vllm_config.model_config
    target = Target(
        name=model_config.model,
        hidden_size=model_config.get_hidden_size(),
        vocab_size=model_config.get_vocab_size(),
        num_layers=model_config.get_total_num_hidden_layers(),
    )
    draft = spec.draft_model_config
    for problem in _problems(
        draft.model, draft.revision, target, spec.num_speculative_tokens, bool(spec.parallel_drafting)
    ):
        if problem.severity == "error" and spec.parallel_drafting:
            raise RefusedError(f"P-EAGLE refused: {problem.line}")
        if problem.severity == "warning":
            logger.warning("%s", problem.line)


def _check_parallelism(vllm_config: "VllmConfig") -> None:
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        raise RefusedError(
            f"P-EAGLE refused: prefill_context_parallel_size={parallel.prefill_context_parallel_size} splits a prompt "
            "over ranks and the drafter needs it whole; set it to 1"
        )
    if parallel.decode_context_parallel_size > 1:
        raise RefusedError(
            f"P-EAGLE refused: decode_context_parallel_size={parallel.decode_context_parallel_size} shards the "
            "drafter's KV cache, which is not supported yet; set it to 1"
        )


@functools.lru_cache(maxsize=8)
def _problems(
    model: str, revision: str | None, target: Target, num_speculative_tokens: int, parallel_drafting: bool
) -> tuple[Problem, ...]:
    """What is wrong with the pair, from the head's files. vLLM builds its config several times; once is enough."""
    try:
        path = locate(model, revision)
        if path is None:
            return ()  # not on this machine yet: the loaded head is checked instead
        head = read_head(path)
    except HeadError as error:
        return (Problem(str(error), "error"),) if parallel_drafting else ()
    return tuple(
        check_pair(
            head, target, num_speculative_tokens=num_speculative_tokens, parallel_drafting=parallel_drafting
        )
    )
