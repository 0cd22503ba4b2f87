"""The V1 runner builds ``EagleProposer`` by name and checks for it in seven places."""

from types import ModuleType

import peagle_vllm.seams as seams
from peagle_vllm.core.config import is_peagle
from peagle_vllm.seams.ledger import Seam, Touch

SEAM = Seam(
    name="proposer",
    runner="V1",
    why="An EagleProposer made for a P-EAGLE head becomes a ParallelEagleProposer; as a subclass it passes "
    "every isinstance check of the runner.",
    waits_for="nothing: vLLM has deprecated the V1 runner",
    delete_when="vLLM drops the V1 model runner",
    touches=(Touch("vllm.v1.spec_decode.eagle", "EagleProposer", "replaced"),),
)


def install(module: ModuleType) -> None:
    stock = module.EagleProposer
    if "__new__" in vars(stock):
        return

    def __new__(cls, vllm_config, *args, **kwargs):
        if cls is stock:
            seams.serving_peagle = is_peagle(vllm_config)
            if seams.serving_peagle:
                from peagle_vllm.v1.proposer import ParallelEagleProposer

                cls = ParallelEagleProposer
        return object.__new__(cls)

    stock.__new__ = __new__
