"""Is a vLLM configuration P-EAGLE, and may the loaded head be served? Imports neither vLLM nor torch by itself."""

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import SpeculativeConfig, VllmConfig

logger = logging.getLogger("vllm.peagle")  # under vLLM's own handler


class RefusedError(RuntimeError):
    """A P-EAGLE configuration that must not be served; the message is one line.

    No ValueError, because pydantic would wrap that into a message of several lines.
    """

    def __str__(self) -> str:
        return f"P-EAGLE refused: {super().__str__()}"


def warn_once(line: str) -> None:
    """Warn of something once a process; under tensor parallelism only rank 0 does."""
    from vllm.logger import init_logger

    if is_first_rank():
        init_logger(logger.name).warning_once("%s", line, scope="process")


def is_first_rank() -> bool:
    """Whether this is tensor parallel rank 0 of its pipeline stage; true before there are ranks."""
    from vllm.distributed import parallel_state

    return not (parallel_state.model_parallel_is_initialized() and parallel_state.get_tensor_model_parallel_rank())


def on_all_ranks(succeeded: bool) -> bool:
    """Whether it did on every tensor parallel rank: they draft together or not at all."""
    import torch
    from vllm.distributed import get_tp_group

    group, least = get_tp_group(), torch.tensor(int(succeeded))
    if group.world_size > 1:
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(least)


def is_peagle(vllm_config: "VllmConfig") -> bool:
    """Whether this configuration drafts with a P-EAGLE head."""
    return is_peagle_spec(vllm_config.speculative_config)


def is_peagle_spec(spec: "SpeculativeConfig | None") -> bool:
    """The same of a ``SpeculativeConfig``. DFlash and DSpark draft in parallel too, by their own methods."""
    is_eagle3 = spec is not None and spec.method == "eagle3"
    return is_eagle3 and bool(getattr(spec, "parallel_drafting", False)) and on_vllm_platform()


def on_vllm_platform() -> bool:
    """Whether the platform is one of vLLM's own: CPU, CUDA, ROCm, XPU.

    Any other (a plugin such as vllm-ascend, the TPU's) brings model runners of its own, and keeps its own behaviour.
    """
    from vllm.platforms import current_platform

    return type(current_platform).__module__.partition(".")[0] == "vllm"


def has_dummy_weights(vllm_config: "VllmConfig") -> bool:
    """Whether the head's weights are dummies, by its own ``draft_load_config`` where it has one."""
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    return get_draft_load_config(vllm_config).load_format == "dummy"


def check_loaded_head(model: Any, vllm_config: "VllmConfig") -> None:
    """Refuse a loaded head whose learned hidden state would give useless drafts without any error.

    That is a ``mask_hidden`` of zeros, NaN or Inf, before or after ``fc``. Dummy weights pass, with a warning.
    """
    import torch

    from peagle_vllm.heads.check_weights import value_fault

    if has_dummy_weights(vllm_config):
        if vllm_config.speculative_config.draft_load_config is None:
            remedy = 'add "draft_load_config": {"load_format": "auto"} to the speculative config for its own'
            warn_once(f"the head has dummy weights, as the target has, until a draft weight update; {remedy}")
        return
    name, mask_hidden = vllm_config.speculative_config.draft_model_config.model, model.mask_hidden
    with torch.inference_mode():
        fault = value_fault(mask_hidden.float().cpu().numpy())
        if fault is None and not bool(model.combine_hidden_states(mask_hidden.view(1, -1)).isfinite().all()):
            fault = "fc makes NaN or Inf of mask_hidden"
    if fault:
        raise RefusedError(f"{fault}: {name}; take the head's weights from their source again")


def refuse_broken(weights: "Iterable[tuple[str, torch.Tensor]]") -> "Iterator[tuple[str, torch.Tensor]]":
    """The same (name, tensor) pairs; ``RefusedError`` at the first one with NaN or Inf.

    Checked while they are loaded, because some layers repack their weights afterwards.
    """
    for name, weight in weights:
        if not _is_finite(weight):
            raise RefusedError(f"{name} holds NaN or Inf: the head's weights; take them from their source again")
        yield name, weight


def _is_finite(weight: "torch.Tensor") -> bool:
    """Whether no value is NaN or Inf, without a second tensor as large. fp8 and whole numbers pass."""
    import torch

    if not weight.is_floating_point() or weight.element_size() < 2 or not weight.numel():
        return True
    return bool(torch.stack(torch.aminmax(weight)).isfinite().all())
