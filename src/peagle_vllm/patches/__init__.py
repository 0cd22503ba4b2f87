"""Every place where this package changes vLLM, one file a patch. ``docs/architecture.md`` is the ledger.

Patches are installed by post-import hooks, so loading the plugin imports no vLLM module, and each
passes every configuration that is not P-EAGLE on to the original.
"""

import functools
import importlib
import os
from typing import TYPE_CHECKING

import wrapt

from peagle_vllm.serving import RefusedError, logger

if TYPE_CHECKING:
    from peagle_vllm.patches.ledger import Patch

# Module of vLLM -> what installs the patches once it is imported, as "file.function", in this order.
HOOKS = {
    "vllm.config.speculative": ("validation.install_speculative", "head_config.install"),
    "vllm.config.vllm": ("validation.install_whole", "gate.install", "capture_range.install"),
    "vllm.model_executor.models.llama_eagle3": ("head_weights.install",),
    "vllm.model_executor.models.qwen3_eagle3": ("head_weights.install",),
    "vllm.v1.worker.gpu.spec_decode": ("v2_speculator.install",),
    "vllm.v1.worker.gpu.model_runner": ("v2_speculator.install",),
    "vllm.v1.spec_decode.eagle": ("v1_proposer.install",),
    "vllm.v1.worker.gpu_model_runner": ("drafter_limit.install",),
    "vllm.v1.worker.gpu_worker": ("weight_update.install",),
    "vllm.v1.cudagraph_dispatcher": ("capture_range.install_dispatcher",),
    "vllm.utils.cpu_triton_utils": ("cpu_sampling.install",),
    "vllm.v1.sample.ops.topk_topp_sampler": ("cpu_sampling.install_top_k",),
}

serving_peagle = False
"""Whether this process drafts with P-EAGLE: for patches that have no configuration at hand."""


@functools.cache
def install_all() -> None:
    """Hook every patch to the import of its vLLM module; at once where that is imported already."""
    for module_name, names in HOOKS.items():
        for name in names:
            wrapt.register_post_import_hook(functools.partial(_install, name), module_name)


def _install(hook: str, module: object) -> None:
    """Install one patch in a module of vLLM. Where it does not fit, vLLM keeps its own code and P-EAGLE is refused."""
    name, function = hook.split(".")
    try:
        getattr(importlib.import_module(f"peagle_vllm.patches.{name}"), function)(module)
    except (AttributeError, KeyError, TypeError) as error:
        logger.warning(
            "peagle-vllm: the patch %s does not fit this vLLM (%s); P-EAGLE will be refused, everything else runs",
            name.replace("_", "-"),
            error,
        )


def all_patches() -> "tuple[Patch, ...]":
    """The ledger: every patch's declaration, in the order of installation."""
    names = dict.fromkeys(hook.partition(".")[0] for hooks in HOOKS.values() for hook in hooks)
    return tuple(importlib.import_module(f"peagle_vllm.patches.{name}").PATCH for name in names)


@functools.cache
def refuse_if_changed() -> None:
    """Raise ``RefusedError`` if a patch no longer fits this vLLM and was not let in; warn of those that were."""
    from peagle_vllm.patches import fingerprint, version

    install = version.find_vllm()
    if install is None:
        return
    try:
        accepted = fingerprint.accepted_patches(os.environ.get(fingerprint.ACCEPT))
    except ValueError as error:
        raise RefusedError(str(error)) from None
    report = fingerprint.check(install, accepted=accepted)
    if report.changed:
        changes = [change for result in report.results for change in result.changed]
        names = ",".join(result.patch.name for result in report.results if result.changed)
        remedy = f"{fingerprint.ACCEPT}={names} serves it all the same"
        if removed := [change.definition.path for change in changes if not change.digest]:
            remedy = f"{removed[0]} is gone, so {fingerprint.ACCEPT} does not help"
        raise RefusedError(f"{report.differs(report.changed)}; `peagle-vllm doctor` names what changed; {remedy}")
    if report.accepted:
        logger.warning(
            "P-EAGLE is served although %s, because %s names them; `peagle-vllm doctor` names what changed",
            report.differs(report.accepted),
            fingerprint.ACCEPT,
        )
