"""A candidate selector beside a head's own files, as serving reads it."""

from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save

from peagle_kernels import CandidateSelector
from peagle_vllm.heads import selector as files
from peagle_vllm.heads.convert import write_json
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER
from peagle_vllm.heads.head import Head


def write_selector(folder: Path, head: Head, selector: CandidateSelector) -> None:
    """Write ``selector``, and config.json with it, into ``folder``, where the other files of ``head`` are."""
    selector_config = files.SelectorConfig(
        selector.predecessor_codebook.shape[1], selector.num_candidates, files.head_hash(head)
    )
    write_json(folder / "config.json", {**head.config, SELECTOR: asdict(selector_config)})
    (folder / SELECTOR_FOLDER).mkdir()
    tensors = {
        files.PREDECESSORS: selector.predecessor_codebook,
        files.SUCCESSORS: selector.successor_codebook,
        files.PROJECTION: selector.hidden_projection,
        files.EDGE_SCALE: selector.edge_scale,
        files.UNARY_SCALE: selector.unary_scale,
    }
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    (folder / SELECTOR_FOLDER / "model.safetensors").write_bytes(save(kept))  # raises OSError where a disk is full
