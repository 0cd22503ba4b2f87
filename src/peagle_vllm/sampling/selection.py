"""What chooses drafts where a row's best token is not enough, on both runners: a head's selector, or a plain one."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig

from peagle_kernels.batch import DraftBuffers
from peagle_kernels.select_candidates import Candidates, CandidateSelector, Choice, Drawing, select_candidates
from peagle_vllm.heads import selector as files
from peagle_vllm.heads.files import SELECTOR_FOLDER, download, find, read_headers
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.vocabulary import with_all_rows
from peagle_vllm.sampling.greedy import top_candidates
from peagle_vllm.serving import RefusedError, has_dummy_weights, refuse_broken

# Of a head without a selector. Any distribution of drafts is exact as long as the rejection sampler is told it, and
# tokens beyond these are rarely drawn.
PLAIN_CANDIDATES = 64


def selector_config_of(vllm_config: VllmConfig) -> files.SelectorConfig | None:
    """What the served head's config says of its selector; None where it has none."""
    spec = vllm_config.speculative_config
    draft = spec.draft_model_config
    return files.read_selector_config(vars(draft.hf_config), f"{draft.model}/config.json")


def num_candidates(vllm_config: VllmConfig) -> int:
    """M, the best tokens of a row that its draft is chosen among; 0: the best token is the draft."""
    selector_config, spec = selector_config_of(vllm_config), vllm_config.speculative_config
    if selector_config:
        return selector_config.selector_top_k
    draws = spec.draft_sample_method == "probabilistic" or spec.enable_adaptive_verification
    return min(PLAIN_CANDIDATES, spec.draft_model_config.hf_config.draft_vocab_size) if draws else 0


def load_selector(model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device) -> CandidateSelector | None:
    """The selector in the folder of the loaded head ``model``; None for a head without one.

    With dummy weights it changes no draft. ``selector_faults`` has checked it already, unless the head was not on this
    machine before vLLM fetched it. RefusedError where it does not fit, or holds NaN or Inf.
    """
    from safetensors.torch import load_file

    selector_config, spec = selector_config_of(vllm_config), vllm_config.speculative_config
    if selector_config is None:
        return None
    draft = spec.draft_model_config
    tensors: dict[str, torch.Tensor] = {}
    if has_dummy_weights(vllm_config):
        sizes = draft.hf_config.vocab_size, draft.hf_config.draft_vocab_size, draft.get_hidden_size()
        shapes = files.selector_shapes(selector_config, *sizes)
        if isinstance(folder := find(draft.model, draft.revision), Path):  # else it is on the hub alone
            shapes |= {name: info.shape for name, info in read_headers(folder / SELECTOR_FOLDER).items()}
        filled = ((name, torch.full(shape, "scale" in name, dtype=draft.dtype)) for name, shape in shapes.items())
        tensors |= with_all_rows(filled, draft.hf_config)
    else:
        folder = download(draft.model, draft.revision)
        for fault in files.selector_faults(read_head(folder)):
            raise RefusedError(fault)
        for file in sorted((folder / SELECTOR_FOLDER).glob("*.safetensors")):
            tensors |= with_all_rows(refuse_broken(load_file(file).items()), draft.hf_config)
    projection = tensors.get(files.PROJECTION)
    names = files.EDGE_SCALE, files.UNARY_SCALE
    ones = torch.ones(max((len(tensors[name]) for name in names if name in tensors), default=1))
    edge_scale, unary_scale = (tensors.get(name, ones).to(device, torch.float32) for name in names)
    selector = CandidateSelector(
        predecessor_codebook=tensors[files.PREDECESSORS].to(device),
        successor_codebook=tensors[files.SUCCESSORS].to(device),
        hidden_projection=None if projection is None else projection.to(device, draft.dtype),
        edge_scale=edge_scale,
        unary_scale=unary_scale,
        num_candidates=selector_config.selector_top_k,
    )
    return registered(selector, model)


def registered(selector: CandidateSelector, model: torch.nn.Module) -> CandidateSelector:
    """``selector`` among the model's buffers, which vLLM saves where sleep discards a draft model's weights."""
    for name, tensor in selector._asdict().items():
        if isinstance(tensor, torch.Tensor):
            model.register_buffer(f"selector_{name}", tensor, persistent=False)
    return selector


def plain_selector(model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device) -> CandidateSelector | None:
    """For a head without a selector: the head's logits alone choose. None where drafts are the best tokens."""
    if not (num := num_candidates(vllm_config)):
        return None
    config = vllm_config.speculative_config.draft_model_config.hf_config
    selector = CandidateSelector(
        predecessor_codebook=torch.zeros(vllm_config.model_config.get_vocab_size(), 1, device=device),
        successor_codebook=torch.zeros(config.draft_vocab_size, 1, device=device),
        hidden_projection=None,
        edge_scale=torch.zeros(1, device=device),
        unary_scale=torch.ones(1, device=device),
        num_candidates=num,
    )
    return registered(selector, model)


def select(
    model: Any,
    selector: CandidateSelector,
    hidden_states: torch.Tensor,
    buffers: DraftBuffers,
    drafts: torch.Tensor,
    scores: torch.Tensor | None = None,
    draw: Drawing | Choice | None = None,
    log_probs: bool = False,
) -> Candidates:
    """Choose drafts, each knowing the one before it.

    Args:
        hidden_states: [num_samples, hidden_size] of the sampled rows, after the head's last norm.
        drafts: [num_reqs, K] int64, receives target token ids.
        scores: [num_samples, M] float32, receives what was chosen by; None where nobody reads it.
        draw: as ``select_candidates`` takes it; None: greedy drafts.
        log_probs: in the head's vocabulary, in place of the candidates' logits; the drafts are the same.

    Returns:
        What was chosen among.
    """
    ids, logits = top_candidates(model, hidden_states, selector.num_candidates, log_probs)
    gates = None if selector.hidden_projection is None else F.linear(hidden_states, selector.hidden_projection)
    candidates = Candidates(ids, logits, gates, buffers.input_ids, buffers.sample_indices[: len(hidden_states)])
    scores = torch.empty_like(logits) if scores is None else scores
    select_candidates(drafts, candidates, selector, model.draft_id_to_target_id, scores, draw)
    return candidates
