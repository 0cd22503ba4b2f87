"""``peagle-vllm train run``: peagle.yaml to speculators' options, the head, its data, and the trainer around them."""

import gc
import os
import re
import warnings
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import loguru
import torch
from pydantic import ValidationError
from speculators.model import SpeculatorModel
from speculators.train import cli as library
from speculators.train.config import TrainConfig
from speculators.train.logger import setup_metric_logger
from transformers.utils.logging import disable_progress_bar

from peagle_tools.shared.errors import ToolError
from peagle_tools.train import cpu, warm_start
from peagle_tools.train.documents import loaders
from peagle_tools.train.draft_model import PEagleDraftModel
from peagle_tools.train.peagle_yaml import Config
from peagle_tools.train.selector_training import new_selector
from peagle_tools.train.trainer import Trainer
from peagle_vllm.heads.files import find, read_headers
from peagle_vllm.heads.target import find_token, read_target, read_tokens, special_tokens

# Of speculators' options: processes run mask rows different numbers of times, and would wait for each other's shards;
# the head recomputes by itself; states are files; no layer has a window; vLLM knows one activation; the rest are keys.
REFUSED = ["fsdp_shard", "gradient_checkpointing", "hidden_states_backend", "checkpoint_freq", "max_steps", "save_best"]
REFUSED += ["train_data_ratio", "draft_config", "from_pretrained", "sliding_window", "draft_hidden_act", "dry_run"]
REFUSED += ["no_resume_from_checkpoint"]
LOGGERS = "tensorboard", "wandb", "trackio", "mlflow"


def run(config: Config) -> str:
    """Train a head with acceptance by replay; what it was, in the first process."""
    trainer = train(config)
    rank, last, best = trainer.rank, trainer.global_step, trainer.checkpointer.path / "best"
    del trainer
    gc.collect()  # hooks of the model refer to its trainer
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()  # the next step's engine needs the memory
    if rank:
        return ""
    return f"trained for {last} steps. The best head: {best}, {best.readlink()}; `peagle-vllm inspect {best}`"


def train(config: Config) -> Trainer:
    """Train a head as peagle.yaml says, or continue one, in all of torchrun's processes. TryAgain at a signal."""
    cpu.setup()
    loguru.logger.disable("speculators")  # it logs every file that it opens
    disable_progress_bar()  # of transformers, for every checkpoint
    warnings.filterwarnings("ignore", "Grad strides do not match")  # those of mask_hidden, which is one row
    options = to_options(config)
    trainer = make_trainer(config, options)
    setup_metric_logger(options.logging.logger, options.logging.run_name, options.logging.log_dir)
    trainer.run()
    return trainer


def make_trainer(config: Config, options: TrainConfig) -> Trainer:
    """The head of ``options``, its data and its trainer, which is where the newest checkpoint was."""
    args = Namespace(**options.flatten())
    library.set_seed(config.optimizer.seed, args.deterministic_cuda)
    head = make_head(config, args)
    # speculators' P-EAGLE always trains them, whatever this option says.
    head.config.embed_requires_grad = config.speculators.get("embed_requires_grad", True)
    head.embed_tokens.weight.requires_grad_(head.config.embed_requires_grad)
    if config.selector:
        head.candidate_selector = new_selector(head, config.selector.rank, config.head.init)
    # Autocast would cast it in each chunk, since it needs no gradient.
    head.verifier_lm_head.to(getattr(torch, config.step.dtype))
    batches = loaders(config, args, head)
    loader: Any = batches[0]
    total = config.optimizer.steps or 0
    for epoch in range(0 if total else args.epochs):  # each order of documents packs in steps of its own
        loader.batch_sampler.set_epoch(epoch)
        total += len(loader)
    call, _ = PEagleDraftModel.get_trainer_kwargs(**vars(args))
    call |= {"max_anchors": config.speculators.get("max_anchors"), "chunk_rows": config.step.chunk_rows}
    fields = {name: getattr(args, name) for name in library.TrainerConfig._fields if hasattr(args, name)}
    fields |= {"num_epochs": args.epochs, "hidden_states_dtype": getattr(torch, config.step.dtype)}
    fields |= {"max_steps": total, "resume_from_checkpoint": True}
    fields |= {"train_call_kwargs": call, "val_call_kwargs": call}
    return Trainer(config, head, library.TrainerConfig(**fields), *batches)


def to_options(config: Config) -> TrainConfig:
    """peagle.yaml as speculators' options.

    ToolError or HeadError for a name or a value that speculators, the target, ``head.init`` or this machine has not.
    """
    head, step = config.head, config.step
    check_output_matrix(config.target)
    ours: dict[str, Any] = {
        "speculator_type": "peagle",
        "seed": config.optimizer.seed,
        "verifier_name_or_path": config.target,
        "num_layers": head.layers,
        "full_attention_indices": list(range(head.layers)),
        "target_layer_ids": config.aux_layers,
        "draft_vocab_size": head.draft_vocab,
        "draft_attn_impl": "sdpa",  # the head has its own
        "data_path": str(config.data_folder),
        "total_seq_len": step.tokens,
        "hidden_states_dtype": step.dtype,
        "on_missing": "raise",
        "optimizer": config.optimizer.name,
        "lr": config.optimizer.lr,
        "epochs": config.optimizer.steps or config.optimizer.epochs,
        "save_path": str(config.run / "checkpoints"),
        "log_dir": str(config.run / "logs"),
        "num_depths": head.depths,
        "down_sample_ratio": step.cod[0],
        "down_sample_ratio_min": step.cod[1],
    }
    if config.data.states == "memory":
        ours["num_workers"] = 0
    defaults = {
        "draft_arch": "qwen3" if "qwen3" in str(read_target(config.target).config.get("model_type")) else "llama",
        "norm_before_residual": False,
        "loss_implementation": "fused" if torch.accelerator.is_available() else "eager",  # the fused one is Triton's
        "scheduler_type": "cosine",
        "log_freq": 10,
        # Each holds four batches, of up to 268 MB at a width of 4,096.
        "num_workers": min(4, (os.cpu_count() or 1) // 2),
    }
    if "mask_token_id" not in config.speculators:
        defaults["mask_token_id"] = unused_token(config.target)
    known = TrainConfig().flatten()
    for name in config.speculators:
        if name in ours or name in REFUSED:
            raise ToolError(f"speculators.{name}: cannot be set here; remove it, or set another key of peagle.yaml")
        if name not in known:
            raise ToolError(f"speculators.{name}: is no option of speculators")
    try:
        options = TrainConfig.from_sources(cli={**defaults, **ours, **config.speculators}, argv=[])
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ToolError(f"speculators.{wrong['loc'][-1] if wrong['loc'] else ''}: {wrong['msg']}") from None
    for name in ("scheduler_warmup_ratio", "weight_decay"):  # the trainer would refuse it
        if not 0 <= (options.flatten()[name] or 0) <= 1:
            raise ToolError(f"speculators.{name}: is {options.flatten()[name]}, and has to be 0 to 1")
    mask_id, size = options.flatten()["mask_token_id"], read_target(config.target).vocab_size
    if not 0 <= mask_id < size:
        raise ToolError(f"speculators.mask_token_id: {mask_id} is none of the target's {size} tokens; leave it out")
    token = find_token(read_tokens(config.target), mask_id)
    if token and token.kind in ("ordinary", "in use"):
        what = f"the target's tokenizer uses {mask_id} for {token.text!r}"
        raise ToolError(f"speculators.mask_token_id: {what}; leave it out")
    if (head.draft_vocab or 0) > size:
        raise ToolError(f"head.draft_vocab: {head.draft_vocab} are more than the target's {size} tokens; lower it")
    if head.init not in (None, "target"):
        warm_start.check_init(config)
    for name in filter(None, map(str.strip, (options.logging.logger or "").split(","))):
        if name not in LOGGERS:
            raise ToolError(f"speculators.logger: {name!r} is none of {', '.join(LOGGERS)}")
        if not find_spec(name):
            raise ToolError(f"speculators.logger: {name} is not installed; pip install {name}, or leave it out")
    return options


def check_output_matrix(target: str) -> None:
    """ToolError for a quantized one: speculators would take the embeddings, or numbers without their scale."""
    source = find(target)
    for name in read_headers(source) if isinstance(source, Path) else source.tensors:
        if re.search(r"\blm_head\.(qweight|weight_(packed|scale))", name):
            what = f"its lm_head is quantized ({name}), which speculators cannot read"
            raise ToolError(f"target: {target}: {what}; name one whose lm_head is not")


def unused_token(target: str) -> int:
    """The id of a token that no text of ``target`` has, for the mask token. ToolError where there is none."""
    tokens = read_tokens(target)
    unused = [i for i in range(read_target(target).vocab_size) if tokens and i not in tokens]
    if not (free := [token.id for token in special_tokens(tokens)] + unused):
        what = "has no token to spare" if tokens else "has no tokenizer.json that can be read"
        raise ToolError(f"{target} {what}; name one that is in no text, as mask_token_id in speculators")
    return free[0]


def make_head(config: Config, args: Namespace) -> PEagleDraftModel:
    """A head in float32 with the target's embeddings and output matrix, begun as ``head.init`` says.

    ToolError for a ``draft_vocab`` without counts of the tokens, and an ``init`` that does not fit.
    """
    SpeculatorModel.registry["peagle"] = PEagleDraftModel  # which the library's trainer checks the head's class against
    if config.head.init not in (None, "target"):
        return warm_start.begun_from(config, args).float()
    try:
        head = library.build_draft_model(args, PEagleDraftModel, **warm_start.draft_vocabulary(config, args)).float()
    except ValueError as error:
        raise ToolError(f"head: {error}") from None
    if config.head.init:
        warm_start.begin_as_target(head, config.target)
    return head
