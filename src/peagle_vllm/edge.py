"""The edge of a sharpened head, as both runners serve it."""

from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig

from peagle_kernels import Candidates, Edge
from peagle_vllm.greedy import top_candidates
from peagle_vllm.heads import edge as files
from peagle_vllm.heads.config import SELECTOR
from peagle_vllm.heads.files import download
from peagle_vllm.serving import refuse_broken


def has_edge(vllm_config: VllmConfig) -> bool:
    """Whether the served head is a sharpened one."""
    spec = vllm_config.speculative_config
    assert spec is not None
    return getattr(spec.draft_model_config.hf_config, SELECTOR, None) is not None


def load_edge(vllm_config: VllmConfig, device: torch.device) -> Edge | None:
    """The edge beside the head's weights; None for a head without one. Checked before: ``heads.edge.edge_faults``.

    Raises:
        RefusedError: a tensor holds NaN or Inf.
    """
    from safetensors.torch import load_file

    spec = vllm_config.speculative_config
    assert spec is not None
    draft = spec.draft_model_config
    selector = files.read_selector(vars(draft.hf_config), draft.model)
    if selector is None:
        return None
    folder = download(draft.model, draft.revision) / files.FOLDER
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {files.edge_name(name): tensor for name, tensor in refuse_broken(load_file(file).items())}
    ones = torch.ones(spec.num_speculative_tokens)
    projection = tensors.get(files.PROJECTION)
    return Edge(
        predecessor_codebook=tensors[files.PREDECESSORS].to(device),
        successor_codebook=tensors[files.SUCCESSORS].to(device),
        hidden_projection=None if projection is None else projection.to(device, draft.dtype),
        edge_scale=tensors.get(files.EDGE_SCALE, ones).to(device, torch.float32),
        unary_scale=tensors.get(files.UNARY_SCALE, ones).to(device, torch.float32),
        num_candidates=selector.selector_top_k,
    )


def find_candidates(
    model: Any, edge: Edge, hidden_states: torch.Tensor, input_ids: torch.Tensor, sample_indices: torch.Tensor
) -> Candidates:
    """What ``walk_edges`` chooses among.

    Args:
        model: the loaded head.
        hidden_states: [num_samples, hidden_size] of the sampled rows, after the head's last norm.
        input_ids: [num_rows] of the draft batch.
        sample_indices: [num_samples] draft row of each sample.
    """
    ids, logits = top_candidates(model, hidden_states, edge.num_candidates)
    gates = None if edge.hidden_projection is None else F.linear(hidden_states, edge.hidden_projection)
    return Candidates(ids, logits, gates, input_ids, sample_indices)
