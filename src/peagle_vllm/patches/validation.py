"""Bad P-EAGLE configurations are refused in one line before any weight is loaded, and requests that end an engine."""

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from peagle_vllm import lookup, patches
from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.config import FAMILIES, MASK_TOKEN_KEYS, TENSORS, is_size
from peagle_vllm.heads.fields import vllm_fields
from peagle_vllm.heads.files import HeadError, find, one_line
from peagle_vllm.heads.head import Head, read_head
from peagle_vllm.heads.rope import TRAINED_LENGTH
from peagle_vllm.heads.target import Target
from peagle_vllm.heads.vocabulary import OWN_VOCAB
from peagle_vllm.patches import head_config
from peagle_vllm.patches.ledger import Patch, members
from peagle_vllm.serving import RefusedError, is_peagle, is_peagle_spec, on_vllm_platform, warn_once

_find = functools.lru_cache(maxsize=8)(find)  # vLLM builds its configuration several times a start

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
    from vllm.sampling_params import SamplingParams

PATCH = Patch(
    name="validation",
    runner="both",
    depends_on={
        "vllm.config.speculative": members("SpeculativeConfig", "__post_init__(...) parallel_drafting(...)"),
        "vllm.config.vllm": ("VllmConfig.__post_init__(...)",),
        "vllm.v1.engine.input_processor": ("InputProcessor.process_inputs(...)",),
        # Reads the aux layers that _give_config names.
        "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils": ("get_eagle3_aux_layers_from_config",),
    },
)

AS_PEAGLE = '"method": "eagle3", "parallel_drafting": true'
# Formats of files that a head, which is safetensors, has not.
OF_OTHER_FILES = ("mistral", "npcache", "pt", "runai_streamer_sharded", "sharded_state", "tensorizer")


def _names_peagle(
    model: str | None = None,
    method: str | None = None,
    parallel_drafting: bool = False,
    revision: str | None = None,
    **others: Any,
) -> bool:
    """Whether the arguments of a ``SpeculativeConfig`` name a P-EAGLE head."""
    if not (model and parallel_drafting and on_vllm_platform()):
        return False
    # A head with mask_hidden has no other method; vLLM would guess from its name.
    return method == "eagle3" or (method is None and _carries_mask_hidden(model, revision))


@PATCH.wraps("vllm.config.speculative", "SpeculativeConfig.__init__", compare=False)
def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if on_vllm_platform() and re.fullmatch("p-?eagle", str(kwargs.get("method")), re.IGNORECASE):
        raise RefusedError(f'"method": "{kwargs["method"]}" is not a method of vLLM; write {AS_PEAGLE}')
    asked = kwargs.get(lookup.FIELD)
    if asked is not None and _names_peagle(**kwargs):
        del kwargs[lookup.FIELD]  # vLLM's field has no 0
    original(self, *args, **kwargs)
    if asked is not None and is_peagle_spec(self) and self.draft_model_config is not None:
        setattr(self.draft_model_config.hf_config, lookup.FIELD, asked)


@PATCH.wraps("vllm.config.speculative", "SpeculativeConfig.__post_init__", compare=False)
def post_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    method = self.method
    if self.target_model_config and _names_peagle(**vars(self)):
        # Before vLLM reads the head, because its own errors are about something else.
        self.method = "eagle3"
        patches.refuse_if_changed()  # here too: vLLM may have moved VllmConfig, and then its hook never runs
        with _head_config(_checked_head(self), self):
            original(self, *args, **kwargs)
        return
    try:
        original(self, *args, **kwargs)
    except Exception as error:
        # Files of an ordinary draft model are not read for this: only a folder, of which vLLM has made no config, or
        # chosen a method by itself.
        is_open = on_vllm_platform() and (self.draft_model_config is None or not method)
        if is_open and os.path.isdir(self.model or "") and _carries_mask_hidden(self.model, None):  # noqa: PTH112
            raise _unnamed(self) from error
        raise
    if self.draft_model_config is not None and self.target_model_config is not None:
        _check_drafter(self)


def _check_drafter(spec: "SpeculativeConfig") -> None:
    """Check a drafter whose config vLLM has read, and whose method it may have found by itself."""
    hf_config = spec.draft_model_config.hf_config
    if spec.method in ("draft_model", "eagle") and on_vllm_platform():
        named, architecture = _mask_token_keys(hf_config), (hf_config.architectures or [None])[0]
        # PARD's draft model names a mask token, too. SpecForge's head need not, and vLLM 0.32 has its architecture.
        if architecture == "PEagleDraftModel" or (named and ("ptd_token_id" in named or architecture in FAMILIES)):
            raise _unnamed(spec)
    if is_peagle_spec(spec):
        _checked_head(spec)  # not refused without weights, which would have shown what it is
        raise _unnamed(spec)


def _mask_token_keys(hf_config: Any) -> list[str]:
    """The fields of a draft config that name a mask token."""
    return [key for key in MASK_TOKEN_KEYS if getattr(hf_config, key, None) is not None]


def _unnamed(spec: "SpeculativeConfig") -> RefusedError:
    return RefusedError(
        f"{spec.model} is a P-EAGLE head, and the speculative config as it stands would run it as another drafter; "
        f"add {AS_PEAGLE}"
    )


@PATCH.wraps("vllm.config.vllm", "VllmConfig.__post_init__", compare=False)
def whole_post_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    _check_whole(self)


def _check_whole(vllm_config: "VllmConfig") -> None:
    """Checks that need the whole configuration. Configurations without EAGLE-3 are left alone."""
    spec = vllm_config.speculative_config
    if spec is None or spec.method != "eagle3" or spec.draft_model_config is None or spec.target_model_config is None:
        return
    if not getattr(spec, "parallel_drafting", False):
        _warn_of_forgotten_flag(spec)
    if not is_peagle_spec(spec):
        return
    patches.refuse_if_changed()
    _check_depth(spec.num_speculative_tokens, vllm_config)
    if spec.rejection_sample_method == "block":
        if not vllm_config.use_v2_model_runner:  # V1 takes it for "standard"
            raise RefusedError("rejection_sample_method=block needs Model Runner V2, this engine runs V1; leave it out")
        from vllm.v1.worker.gpu.sample import gumbel

        if not hasattr(gumbel, "spec_step_seed"):  # 0.32 compares a position with one random number in two steps
            raise RefusedError("rejection_sample_method=block samples wrongly before vLLM 0.33; leave it out")
    attention = vllm_config.attention_config
    is_inherited = vllm_config.use_v2_model_runner and not (spec.attention_backend or attention.backend_per_kind)
    if is_inherited and attention.backend and "MLA" in attention.backend.name:
        what = f"attention_backend={attention.backend.name} is for latent attention, which no head has"
        raise RefusedError(f'{what}; add "attention_backend": "FLASH_ATTN", or another, to the speculative config')
    if (schedule := spec.num_speculative_tokens_per_batch_size) is not None:
        from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

        try:
            validate_and_normalize_dynamic_sd_schedule(schedule)
        except (TypeError, ValueError) as error:  # vLLM's engine would meet it once the weights are loaded
            what = f"num_speculative_tokens_per_batch_size is {schedule} ({one_line(error)})"
            raise RefusedError(f"{what}; write [from, to, K] for batch sizes from 1 on") from None
    _check_positions(spec.draft_model_config, vllm_config.model_config.max_model_len)
    lookup.settle_lookup(vllm_config)
    has_other_files = vllm_config.load_config.load_format in OF_OTHER_FILES
    # Of a rank that elastic EP adds, vLLM makes the target's config one of dummy weights, and sends the target's alone.
    if spec.draft_load_config is None and (has_other_files or vllm_config.parallel_config.enable_elastic_ep):
        options = {"load_format": "auto", "model_loader_extra_config": {}} if has_other_files else {}
        spec.draft_load_config = replace(vllm_config.load_config, **options)  # else the target's
    target = vllm_config.model_config
    if min_p := target.get_diff_sampling_param().get("min_p"):
        warn_once(
            f"generation_config.json of {target.model} sets min_p={min_p}, which vLLM refuses with speculation: every "
            """sampled request ends in HTTP 400; add --override-generation-config '{"min_p": 0}'"""
        )
    _check_parallelism(vllm_config)


@PATCH.wraps("vllm.v1.engine.input_processor", "InputProcessor.process_inputs", compare=False)
def process_inputs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns vLLM's request. Raises VLLMValidationError, HTTP 400, for one that would end the engine."""
    from vllm.exceptions import VLLMValidationError

    request = original(self, *args, **kwargs)
    if request.sampling_params is not None and is_peagle(self.vllm_config):
        for name, problem in _what_ends_the_engine(request.sampling_params, self.vllm_config):
            raise VLLMValidationError(f"{name} {problem}", parameter=name)
    return request


def _what_ends_the_engine(params: "SamplingParams", vllm_config: "VllmConfig") -> Iterator[tuple[str, str]]:
    """V2 keeps requests in buffers of fixed widths. vLLM itself checks how many bad_words there are."""
    if not vllm_config.use_v2_model_runner:
        if params.logprob_token_ids:  # with ``logprobs`` of any request beside it (vLLM PR 44727)
            yield "logprob_token_ids", "needs Model Runner V2 with speculation; /generative_scoring sets it"
        return
    from vllm import envs
    from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_ALLOWED_TOKEN_IDS, MAX_NUM_STOP_TOKEN_IDS

    stops = params.all_stop_token_ids if params.min_tokens else ()
    for name, what, num, limit in (
        ("max_tokens", "is", params.max_tokens or 0, 2**31 - 1 - vllm_config.model_config.max_model_len),
        ("allowed_token_ids", "holds", len(params.allowed_token_ids or ()), MAX_NUM_ALLOWED_TOKEN_IDS),
        ("bad_words", "makes", sum(map(len, params.bad_words_token_ids or ())), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
        ("stop_token_ids", "beside min_tokens, with the end of text, holds", len(stops), MAX_NUM_STOP_TOKEN_IDS),
    ):
        if num > limit:
            yield name, f"{what} {num} tokens; Model Runner V2 takes {limit}"
    for seed in ((params.seed or 0), (params.seed or 0) + params.n - 1):  # the first answer's, and the last one's
        if not -(2**63) <= seed < 2**63:
            yield "seed", f"is {seed}, where answer i has seed + i; Model Runner V2 takes 64 bits, with a sign"


def _check_parallelism(vllm_config: "VllmConfig") -> None:
    refused = {"prefill_context_parallel_size": "splits a prompt over ranks and the drafter needs it whole"}
    if not vllm_config.use_v2_model_runner:
        refused["decode_context_parallel_size"] = "shards the drafter's KV cache on V1"
    elif not vllm_config.scheduler_config.async_scheduling:
        refused["pipeline_parallel_size"] = "has wrong output with --no-async-scheduling (vLLM issue 52071)"
    for name, why in refused.items():
        if (size := getattr(vllm_config.parallel_config, name)) > 1:
            raise RefusedError(f"{name}={size} {why}; set it to 1")


def _check_depth(num_tokens: int, vllm_config: "VllmConfig") -> None:
    """Refuse a K with which vLLM starts, and ends at the first request, or during the warm-up."""
    # vLLM warms V2 up with requests of K + 2 tokens, each in one step. A request whose prefix another engine computed
    # begins with K + 1, and vLLM keeps K - 1 more free for it: without room for both it would wait for ever.
    max_len, max_rows = vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_batched_tokens
    rows = f"max_num_batched_tokens {max_rows}"
    limits = {f"max_model_len {max_len}": max_len - 2, rows: min(max_rows - 2, max_rows // 2)}
    if not vllm_config.use_v2_model_runner:
        from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

        limits["the V1 model runner"] = MAX_SPEC_LEN
    what, limit = min(limits.items(), key=lambda item: item[1])
    if num_tokens > limit:
        raise RefusedError(f"num_speculative_tokens is {num_tokens}, and {what} allows {limit} at most; lower it")
    # vLLM's scheduler leaves room for a request's mask rows: a prompt that it may not cut would wait for ever.
    if max_rows < (needed := max_len + num_tokens - 2) and not vllm_config.scheduler_config.enable_chunked_prefill:
        what = f"max_num_batched_tokens is {max_rows}, and without chunked prefill the longest prompt needs {needed}"
        raise RefusedError(f"{what}; raise it")


def _check_positions(draft: "ModelConfig", max_model_len: int) -> None:
    """vLLM makes a yarn embedding as long as it was trained, and reads past its end for longer sequences."""
    rope = draft.hf_config.rope_parameters
    if rope["rope_type"] == "yarn" and (num := int(rope["factor"] * rope[TRAINED_LENGTH])) < max_model_len:
        what = f"rope_parameters gives the head {num} positions, max_model_len is {max_model_len}"
        raise RefusedError(f"{what}: {draft.model}/config.json; lower --max-model-len to {num}, or correct its factor")


def _checked_head(spec: "SpeculativeConfig") -> Head:
    """The head. Raises RefusedError if it is nowhere, cannot be read, or does not fit."""
    try:
        head = read_head(_find(spec.model, spec.revision))
    except HeadError as error:
        raise RefusedError(str(error)) from None
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
        warn_once(problem.line)
    return head


def _warn_of_forgotten_flag(spec: "SpeculativeConfig") -> None:
    """Reads only what vLLM has loaded anyway, so that plain EAGLE-3 needs no further file or request to the hub."""
    draft = spec.draft_model_config
    if _mask_token_keys(draft.hf_config):
        warn_once(
            f"{draft.model} names a mask token, as P-EAGLE heads do, and is served as EAGLE-3, one token a forward: "
            'if it is a P-EAGLE head, add "parallel_drafting": true to the speculative config'
        )


def _carries_mask_hidden(model: str, revision: str | None) -> bool:
    try:
        return "mask_hidden" in read_head(_find(model, revision)).tensors
    except HeadError:
        return False


@contextmanager
def _head_config(head: Head, spec: "SpeculativeConfig") -> Iterator[None]:
    """Run vLLM's own ``__post_init__`` under this: it gets the config that it needs for the head."""
    fields = vllm_fields(head) | {TENSORS: sorted(head.weights)}
    if spec.num_speculative_tokens is None and is_size(n_predict := head.served.get("n_predict")):
        fields["n_predict"] = n_predict  # of a stated number vLLM would want a multiple of it
    if (vocab_size := spec.target_model_config.get_vocab_size()) > head.vocab_size:
        fields |= {OWN_VOCAB: head.vocab_size, "vocab_size": vocab_size}
    with head_config.serving(fields, spec.target_model_config):
        try:
            yield
        except Exception as error:
            if spec.draft_model_config is not None or isinstance(error, RefusedError):
                raise  # not about the head's config
            what = f"vLLM cannot take the head's config ({one_line(error)})"
            raise RefusedError(f"{what}: {head.config_file}; correct it, or the speculative config") from error
    if not hasattr(spec.draft_model_config.hf_config, TENSORS):
        raise RefusedError("this vLLM did not read the head's config through peagle-vllm: another vLLM is needed")
    spec.draft_model_config.config_format = spec.target_model_config.config_format
