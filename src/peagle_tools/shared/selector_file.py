"""Writes a candidate selector next to a head's own files, as serving reads it."""

from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save

from peagle_kernels.select_candidates import CandidateSelector
from peagle_tools.shared.atomic_files import write_whole
from peagle_vllm.heads import selector as files
from peagle_vllm.heads.convert import write_json
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER
from peagle_vllm.heads.head import Head

NUM_CANDIDATES = 16  # a position


def write_selector(folder: Path, head: Head, selector: CandidateSelector) -> None:
    """Write ``selector``, and config.json with it, into ``folder``, where the other files of ``head`` are."""
    rank = selector.predecessor_codebook.shape[1]
    selector_config = files.SelectorConfig(rank, selector.num_candidates, files.head_hash(head))
    write_json(folder / "config.json", {**head.config, SELECTOR: asdict(selector_config)})
    (folder / SELECTOR_FOLDER).mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in files.named_tensors(selector).items()}
    write_whole(folder / SELECTOR_FOLDER / "model.safetensors", save(tensors))
