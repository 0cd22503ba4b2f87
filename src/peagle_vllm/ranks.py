"""Tensor parallel ranks decide alike: they draft together or not at all."""


def on_all_ranks(succeeded: bool) -> bool:
    """Whether it did on every rank."""
    import torch
    from vllm.distributed import get_tp_group

    group, least = get_tp_group(), torch.tensor(int(succeeded))
    if group.world_size > 1:
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(least)
