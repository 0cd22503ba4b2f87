"""A candidate selector next to a head's own files, as serving reads it."""

from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from peagle_kernels.select_candidates import CandidateSelector
from peagle_tools.shared.atomic_files import write_whole
from peagle_vllm.heads import selector as files
from peagle_vllm.heads.convert import write_json
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER
from peagle_vllm.heads.head import Head


def write_selector(folder: Path, head: Head, selector: CandidateSelector) -> None:
    """Write ``selector``, and config.json with it, into ``folder``, where the other files of ``head`` are."""
    rank = selector.predecessor_codebook.shape[1]
    selector_config = files.SelectorConfig(rank, selector.num_candidates, files.head_hash(head))
    write_json(folder / "config.json", {**head.config, SELECTOR: asdict(selector_config)})
    (folder / SELECTOR_FOLDER).mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in files.named_tensors(selector).items()}
    write_whole(folder / SELECTOR_FOLDER / "model.safetensors", save(tensors))


def read_selector(head: Head) -> CandidateSelector | None:
    """The selector of a head whose files are checked; a scale that is missing is 1 everywhere. None: it has none."""
    config = files.read_selector_config(head.config, head.config_file)
    if config is None or head.folder is None:
        return None
    tensors: dict[str, torch.Tensor] = {}
    for file in (head.folder / SELECTOR_FOLDER).glob("*.safetensors"):
        tensors |= load_file(file)
    given = [tensors.get(name) for name in (files.EDGE_SCALE, files.UNARY_SCALE)]
    ones = torch.ones(max((len(scale) for scale in given if scale is not None), default=1))
    edge, unary = (ones if scale is None else scale for scale in given)
    tables = tensors[files.PREDECESSORS], tensors[files.SUCCESSORS], tensors.get(files.PROJECTION)
    return CandidateSelector(*tables, edge, unary, config.selector_top_k)
