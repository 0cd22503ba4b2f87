"""Bad P-EAGLE configurations are refused in one line, before any weight is loaded."""

import functools
import os
from collections.abc import Callable
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

from peagle_vllm import lookup, patches
from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.config import family_of, is_size
from peagle_vllm.heads.fields import vllm_fields
from peagle_vllm.heads.files import HeadError, NotFoundError, find, one_line, path_fault
from peagle_vllm.heads.head import Head, read_head
from peagle_vllm.heads.rope import TRAINED_LENGTH
from peagle_vllm.heads.target import Target
from peagle_vllm.heads.vocabulary import serve_larger_target
from peagle_vllm.patches import head_config
from peagle_vllm.patches.ledger import Patch
from peagle_vllm.patches.patching import wrap
from peagle_vllm.serving import (
    RefusedError,
    is_peagle_spec,
    logger,
    on_vllm_platform,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # where vLLM looks for a P-EAGLE head's mask token

PATCH = Patch(
    name="validation",
    runner="both",
    why="vLLM serves heads with a zero, NaN or misread mask_hidden without an error, and refuses others with an "
    "error about something else.",
    delete_when="vLLM refuses the heads of tests/heads by itself",
    depends_on={
        "vllm.config.speculative": ("SpeculativeConfig.__post_init__(...)",),
        "vllm.config.vllm": ("VllmConfig.__post_init__(...)",),
        # Reads the aux layers that _complete sets.
        "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils": ("get_eagle3_aux_layers_from_config",),
    },
)


class Drafter(Enum):
    """What the arguments of a ``SpeculativeConfig`` name."""

    PEAGLE = "a P-EAGLE head"
    UNKNOWN = "a model whose method vLLM finds"
    OTHER = "another drafter, or a platform that vLLM does not know"


def _named(
    model: str | None = None,
    method: str | None = None,
    parallel_drafting: bool = False,
    revision: str | None = None,
    **others: Any,
) -> Drafter:
    if not (model and on_vllm_platform()):
        return Drafter.OTHER
    if parallel_drafting and (method == "eagle3" or (method is None and _carries_mask_hidden(model, revision))):
        return Drafter.PEAGLE  # a head with mask_hidden has no other method; vLLM would guess from its name
    return Drafter.OTHER if method else Drafter.UNKNOWN


def install_speculative(module: ModuleType) -> None:
    @wrap(module.SpeculativeConfig, "__init__")
    def __init__(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        asked = kwargs.get(lookup.FIELD)
        if asked is not None and _named(**kwargs) is Drafter.PEAGLE:
            lookup.check_lookup(asked)
            del kwargs[lookup.FIELD]  # vLLM's field has no 0
        original(self, *args, **kwargs)
        if asked is not None and is_peagle_spec(self) and self.draft_model_config is not None:
            lookup.check_lookup(asked)  # vLLM may have found the method by itself
            setattr(self.draft_model_config.hf_config, lookup.FIELD, asked)

    @wrap(module.SpeculativeConfig, "__post_init__")
    def __post_init__(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        named = _named(self.model, self.method, self.parallel_drafting, self.revision)
        if named is Drafter.PEAGLE and self.target_model_config:
            # Before vLLM reads the head, because its own errors are about something else.
            self.method = "eagle3"
            if line := path_fault(self.model, self.revision):
                raise RefusedError(line)  # vLLM would look for it on the hub
            _check_head(self.model, self)
            _read_config(original, self, *args, **kwargs)
            _complete(self)
            return
        try:
            original(self, *args, **kwargs)
        except Exception as error:
            # Files of an ordinary draft model are not read for this: only a folder, once vLLM has given up.
            is_folder = named is Drafter.UNKNOWN and os.path.isdir(self.model)  # noqa: PTH112
            if is_folder and not self.parallel_drafting and _carries_mask_hidden(self.model, self.revision):
                raise _unnamed(self) from error
            raise
        if self.draft_model_config is not None and self.target_model_config is not None:
            _check_found(self)


def _check_found(spec: "SpeculativeConfig") -> None:
    """Check a drafter whose config vLLM has read, and whose method it may have found by itself."""
    is_other = spec.method in ("draft_model", "eagle") and on_vllm_platform()
    if is_other and _names_peagle(spec.draft_model_config.hf_config):
        raise _unnamed(spec)
    if spec.parallel_drafting and is_peagle_spec(spec):
        _check_head(spec.draft_model_config.model, spec)
        _complete(spec)


def _names_peagle(hf_config: Any) -> bool:
    """Whether a draft config that vLLM has read is that of a P-EAGLE head, and not of PARD's draft model."""
    named = {key: getattr(hf_config, key, None) for key in (*MASK_TOKEN_KEYS, "architectures")}
    architecture = next(iter(named.pop("architectures") or ()), None)
    is_eagle3 = family_of(architecture) is not None or named["ptd_token_id"] is not None
    return is_eagle3 and any(token is not None for token in named.values())


def _unnamed(spec: "SpeculativeConfig") -> RefusedError:
    return RefusedError(
        f"{spec.model} is a P-EAGLE head, and the speculative config as it stands would run it as another drafter; "
        'add "method": "eagle3", "parallel_drafting": true'
    )


def install_whole(module: ModuleType) -> None:
    @wrap(module.VllmConfig, "__post_init__")
    def __post_init__(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _check_whole(self)


def _check_whole(vllm_config: "VllmConfig") -> None:
    """Checks that need the whole configuration. Configurations without EAGLE-3 are left alone."""
    spec = vllm_config.speculative_config
    if spec is None or spec.method != "eagle3" or spec.draft_model_config is None or spec.target_model_config is None:
        return
    if not spec.parallel_drafting:
        _warn_of_forgotten_flag(spec)
    if not is_peagle_spec(spec):
        return
    patches.refuse_if_changed()
    _check_depth(spec.num_speculative_tokens, vllm_config)
    if spec.rejection_sample_method == "block" and not vllm_config.use_v2_model_runner:
        # V1 knows the method "synthetic" alone, and takes any other for "standard".
        raise RefusedError("rejection_sample_method=block needs Model Runner V2, this engine runs V1; leave it out")
    _check_positions(spec.draft_model_config, vllm_config.model_config.max_model_len)
    lookup.settle_lookup(vllm_config)
    _warn_of_refused_sampling(vllm_config.model_config)
    parallel = vllm_config.parallel_config
    if (size := parallel.prefill_context_parallel_size) > 1:
        why = "splits a prompt over ranks and the drafter needs it whole"
        raise RefusedError(f"prefill_context_parallel_size={size} {why}; set it to 1")
    if (
        parallel.pipeline_parallel_size > 1
        and vllm_config.use_v2_model_runner
        and not vllm_config.scheduler_config.async_scheduling
    ):
        what = f"pipeline_parallel_size={parallel.pipeline_parallel_size} without asynchronous scheduling"
        why = "has wrong output on Model Runner V2 (vLLM issue 52071); leave out --no-async-scheduling"
        raise RefusedError(f"{what} {why}, or set the size to 1")
    if (size := parallel.decode_context_parallel_size) > 1 and not vllm_config.use_v2_model_runner:
        why = "shards the drafter's KV cache on V1; set it to 1, or use Model Runner V2"
        raise RefusedError(f"decode_context_parallel_size={size} {why}")


def _check_depth(num_tokens: int, vllm_config: "VllmConfig") -> None:
    """Refuse a K with which vLLM starts, and ends at the first request, or during the warm-up."""
    # vLLM warms V2 up with requests of K + 2 tokens, each in one step; nothing else bounds K there.
    max_len, max_rows = vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_batched_tokens
    limits = {f"max_model_len {max_len}": max_len - 2, f"max_num_batched_tokens {max_rows}": max_rows - 2}
    if not vllm_config.use_v2_model_runner:
        from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

        limits["the V1 model runner"] = MAX_SPEC_LEN
    what, limit = min(limits.items(), key=lambda item: item[1])
    if num_tokens > limit:
        raise RefusedError(f"num_speculative_tokens is {num_tokens}, and {what} allows {limit} at most; lower it")


def _check_positions(draft: "ModelConfig", max_model_len: int) -> None:
    """vLLM makes a yarn embedding as long as it was trained, and reads past its end for longer sequences."""
    rope = getattr(draft.hf_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and (num := int(rope["factor"] * rope[TRAINED_LENGTH])) < max_model_len:
        what = f"factor {rope['factor']:g} x {TRAINED_LENGTH} {rope[TRAINED_LENGTH]} of rope_parameters"
        raise RefusedError(
            f"{what} gives the head {num} positions, max_model_len is {max_model_len}: {draft.model}/config.json; "
            f"lower --max-model-len to {num}, or correct them"
        )


def _check_head(model: str, spec: "SpeculativeConfig") -> None:
    """Refuse a P-EAGLE head that does not fit. One that is not on this machine yet is checked when it is loaded."""
    head = _read(model, spec.revision)
    if isinstance(head, HeadError):
        raise RefusedError(str(head))
    if head is None:
        return
    config = spec.target_model_config
    target = Target(
        name=config.model,
        hidden_size=config.get_hidden_size(),
        vocab_size=config.get_vocab_size(),
        num_layers=config.get_total_num_hidden_layers(),
        tokenizer=config.tokenizer,
    )
    for problem in check_pair(head, target, num_speculative_tokens=spec.num_speculative_tokens):
        if problem.severity == "error":
            raise RefusedError(problem.line)
        _warn_once(problem.line)


def _warn_of_forgotten_flag(spec: "SpeculativeConfig") -> None:
    """Reads only what vLLM has loaded anyway, so that plain EAGLE-3 needs no further file or request to the hub."""
    draft = spec.draft_model_config
    named = [key for key in MASK_TOKEN_KEYS if getattr(draft.hf_config, key, None) is not None]
    if named:
        _warn_once(
            f"{draft.model} names a {named[0]}, as P-EAGLE heads do, and is served as EAGLE-3, one token a forward: "
            'if it is a P-EAGLE head, add "parallel_drafting": true to the speculative config'
        )


def _warn_of_refused_sampling(target: "ModelConfig") -> None:
    """vLLM refuses a request for a parameter that its client never sent, where the target's defaults have it."""
    min_p = target.get_diff_sampling_param().get("min_p")
    if min_p:
        source = target.model if target.generation_config in ("auto", "vllm") else target.generation_config
        _warn_once(
            f"generation_config.json of {source} (or --override-generation-config) sets min_p={min_p}, which vLLM "
            "refuses with speculation: every sampled request that sends no min_p of its own ends in HTTP 400; "
            """add --override-generation-config '{"min_p": 0}'"""
        )


def _carries_mask_hidden(model: str, revision: str | None) -> bool:
    head = _read(model, revision)
    return isinstance(head, Head) and "mask_hidden" in head.tensors


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning("%s", line)


def _read_config(original: Callable[..., None], spec: "SpeculativeConfig", *args: Any, **kwargs: Any) -> None:
    """Give vLLM the config that it needs for the head, where its files are known."""
    head = _read(spec.model, spec.revision)
    if not isinstance(head, Head):
        original(spec, *args, **kwargs)
        return
    fields = vllm_fields(head)
    if spec.num_speculative_tokens is None and is_size(n_predict := head.served.get("n_predict")):
        fields["n_predict"] = n_predict  # of a stated number vLLM would want a multiple of it
    with head_config.serving(fields, spec.target_model_config):
        try:
            original(spec, *args, **kwargs)
        except RefusedError:
            raise
        except Exception as error:
            if spec.draft_model_config is not None:
                raise  # not about the head's config
            raise RefusedError(
                f"vLLM cannot take the head's config ({one_line(error)}): {head.config_file}; correct it"
            ) from error
    spec.draft_model_config.config_format = spec.target_model_config.config_format


def _complete(spec: "SpeculativeConfig") -> None:
    """Put on a head's config what is the target's, a larger vocabulary.

    And of a head whose files vLLM alone knows, what it does not look for everywhere: aux layers that stand inside
    ``eagle_config``, and the length of the rotary embedding, which it only corrects.
    """
    hf_config = spec.draft_model_config.hf_config
    serve_larger_target(spec.draft_model_config, spec.target_model_config.get_vocab_size())
    if getattr(hf_config, "max_position_embeddings", None) is None:
        hf_config.max_position_embeddings = spec.target_model_config.max_model_len
    nested = getattr(hf_config, "eagle_config", None) or {}
    named = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    if named and not getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None):
        hf_config.eagle_aux_hidden_state_layer_ids = list(named)


@functools.lru_cache(maxsize=8)
def _read(model: str, revision: str | None) -> Head | HeadError | None:
    """The head's files, the reason why they cannot be read, or None where they are not found: vLLM says best why.

    vLLM builds its configuration several times a start; once is enough.
    """
    try:
        return read_head(find(model, revision))
    except NotFoundError:
        return None
    except HeadError as error:
        return error
