"""speculators' trainer on a machine without an accelerator, which it does not provide for."""

import os
import warnings

import torch
import torch.distributed as dist
from speculators.train import checkpointer, distributed, trainer


def setup() -> None:
    """Set up torchrun's processes, on a CPU too, how checkpoints are loaded, and which attention kernels run."""
    # It loads a checkpoint to the accelerator, "cuda:0" where there is none. AdamW's step counts would stay there, and
    # each step wait for each of them; the weights would be there twice.
    checkpointer.get_current_device = lambda: "cpu"
    # torch prefers cuDNN's on Hopper, which compiles a kernel for each shape: here each document and chunk has its own.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not torch.accelerator.is_available():
        # Its step timer waits for the accelerator, and torch raises where there is none.
        trainer.torch.accelerator.synchronize = lambda *_: None
        warnings.filterwarnings("ignore", "(?s).*(pin_memory|CPU autocast)")  # it always pins and always autocasts
        if "LOCAL_RANK" in os.environ and not dist.is_initialized():
            # Its setup raises where there is no accelerator. The trainer reads these variables.
            dist.init_process_group("gloo")
            distributed._is_distributed = True
            distributed._rank, distributed._world_size = dist.get_rank(), dist.get_world_size()
            distributed._init_sp_process_groups(dist.get_rank(), dist.get_world_size(), 1)
    elif not dist.is_initialized():
        distributed.maybe_setup_distributed()
