"""Every place where this package changes vLLM, one file a patch. ``docs/architecture.md`` is the ledger.

Post-import hooks install them, so loading the plugin imports no vLLM module, and each passes every configuration that
is not P-EAGLE on to the original; `cpu-sampling` does so until the process has built an engine of P-EAGLE.
"""

import functools
import importlib
from typing import TYPE_CHECKING

import wrapt

from peagle_vllm.serving import RefusedError, logger

if TYPE_CHECKING:
    from peagle_vllm.patches.ledger import Hook, Patch

NAMES = (  # of the files, in the order of installation
    *("validation", "head_config", "gate", "capture_range", "head_weights", "v2_speculator", "v1_proposer"),
    *("drafter_limit", "v1_async", "weight_update", "cpu_sampling"),
)


@functools.cache
def install_all() -> None:
    """Hook every patch to the import of its vLLM modules; at once where they are imported already."""
    for patch in all_patches():
        for module_name, hook in patch.hooks:
            wrapt.register_post_import_hook(functools.partial(_install, patch, hook), module_name)


def _install(patch: "Patch", hook: "Hook", module: object) -> None:
    """Install one patch in a module of vLLM. Where it does not fit, vLLM keeps its own code and P-EAGLE is refused."""
    try:
        hook(module)
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        logger.warning(
            "peagle-vllm: the patch %s does not fit this vLLM (%s); P-EAGLE will be refused, everything else runs",
            patch.name,
            error,
        )


def all_patches() -> "tuple[Patch, ...]":
    """The ledger: every patch's declaration, in the order of installation."""
    return tuple(importlib.import_module(f"peagle_vllm.patches.{name}").PATCH for name in NAMES)


@functools.cache
def refuse_if_changed() -> None:
    """Raise ``RefusedError`` if a patch no longer fits this vLLM and was not let in; warn of those that were."""
    from peagle_vllm.patches import fingerprint, version

    install = version.find_vllm()
    if install is None:
        return
    try:
        accepted = fingerprint.accepted_patches()
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
