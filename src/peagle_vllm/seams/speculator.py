"""Model Runner V2 builds its speculator in ``init_speculator``, which has no registry."""

from types import ModuleType

from peagle_vllm.core.config import is_peagle
from peagle_vllm.seams.ledger import Seam, Touch
from peagle_vllm.seams.patching import wrap

SEAM = Seam(
    name="speculator",
    runner="V2",
    why="init_speculator would build vLLM's sequential EagleSpeculator for a P-EAGLE head.",
    waits_for="a speculator registry in vLLM, or ParallelEagleSpeculator merged there",
    delete_when="init_speculator can be told of a speculator class",
    touches=(Touch("vllm.v1.worker.gpu.spec_decode", "init_speculator", "wrapped"),),
)


def install(module: ModuleType) -> None:
    """Wrap ``init_speculator`` in the module that defines it or in the runner, which imports it by value."""

    def make(original):
        def init_speculator(vllm_config, device, *args, **kwargs):
            if not is_peagle(vllm_config):
                return original(vllm_config, device, *args, **kwargs)
            # Imported late: vLLM's CPU worker patches names that this module would bind.
            from peagle_vllm.v2.speculator import ParallelEagleSpeculator

            return ParallelEagleSpeculator(vllm_config, device)

        return init_speculator

    wrap(module, "init_speculator", make)
