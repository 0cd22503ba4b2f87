"""The selector of a sharpened head: config.json's ``candidate_selector`` and the tensors in a folder of their own.

They are DFlash2's names. vLLM passes every tensor of a head's folder on to the model, but does not look into that one,
so a sharpened head still drafts without its selector in stock vLLM.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peagle_vllm.heads.config import is_size
from peagle_vllm.heads.files import FLOATS, SELECTOR, SELECTOR_FOLDER, HeadError, read_headers, read_tensor, shown
from peagle_vllm.heads.head import Head, read_map

if TYPE_CHECKING:
    import torch

    from peagle_kernels.select_candidates import CandidateSelector

PREDECESSORS = "candidate_selector.predecessor_codebook"  # [target vocabulary, rank]
SUCCESSORS = "candidate_selector.successor_codebook"  # [draft vocabulary, rank]
PROJECTION = "candidate_selector.hidden_projection.weight"  # [rank, hidden_size]; absent: the selector has no gate
EDGE_SCALE = "candidate_selector.edge_scale"  # [positions] float32; absent: 1
UNARY_SCALE = "candidate_selector.unary_scale"  # likewise
MOST = 1024  # rank, and candidates a position
HASHED_BYTES = 1 << 20  # of a tensor
SHARPEN_AGAIN = f"sharpen the head again, or remove {SELECTOR} from its config.json"


@dataclass(frozen=True)
class SelectorConfig:
    """config.json's ``candidate_selector``."""

    selector_rank: int  # columns of the codebooks
    selector_top_k: int  # candidates a position, M
    head_hash: str  # of the head that the selector was fitted to


def read_selector_config(config: Mapping[str, Any], file: str) -> SelectorConfig | None:
    """``candidate_selector`` of a head's config; None where it has none. HeadError where it is not one."""
    entry = config.get(SELECTOR)
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise HeadError(f"{SELECTOR} is {shown(entry)}, needs a JSON object: {file}; {SHARPEN_AGAIN}")
    sizes = [entry.get("selector_rank"), entry.get("selector_top_k")]
    if not all(is_size(size) and size <= MOST for size in sizes):
        what = f"selector_rank and selector_top_k of {SELECTOR} are {shown(sizes)}, need 1 to {MOST}"
        raise HeadError(f"{what}: {file}; {SHARPEN_AGAIN}")
    return SelectorConfig(entry["selector_rank"], entry["selector_top_k"], str(entry.get("head_hash")))


def selector_shapes(
    selector_config: SelectorConfig, vocab_size: int, draft_vocab_size: int, hidden_size: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of a selector's matrices. Its scales have as many numbers as it was fitted to positions."""
    return {
        PREDECESSORS: (vocab_size, selector_config.selector_rank),
        SUCCESSORS: (draft_vocab_size, selector_config.selector_rank),
        PROJECTION: (selector_config.selector_rank, hidden_size),
    }


def named_tensors(selector: "CandidateSelector") -> "dict[str, torch.Tensor]":
    """A served selector's tensors by their names in a file."""
    names = PREDECESSORS, SUCCESSORS, PROJECTION, EDGE_SCALE, UNARY_SCALE
    return {name: tensor for name, tensor in zip(names, selector[:5], strict=True) if tensor is not None}


def head_hash(head: Head) -> str:
    """Which head this is: its vocabulary's map, names, types and sizes of its tensors, the content of the small ones.

    Norms and ``mask_hidden`` are small, and no training leaves them as they were. So a head of gigabytes is known in
    milliseconds. ``convert`` does not change the hash.
    """
    assert head.folder is not None
    digest = hashlib.sha256()
    targets = read_map(head).target_ids
    digest.update(b"" if targets is None else targets.astype("<i8").tobytes())
    for name, info in head.weights.items():
        digest.update(f"{name} {info.dtype} {[size for size in info.shape if size != 1]}\n".encode())
        if info.num_bytes <= HASHED_BYTES:
            digest.update(read_tensor(head.folder, info))
    return digest.hexdigest()[:16]


def selector_faults(head: Head) -> Iterator[str]:
    """Why a head's selector cannot be served with it. HeadError where the config's entry or a file cannot be read."""
    selector_config = read_selector_config(head.config, head.config_file)
    if selector_config is None or head.folder is None:
        return
    place = f"{head.name}/{SELECTOR_FOLDER}"
    tensors = read_headers(head.folder / SELECTOR_FOLDER)
    needed = selector_shapes(selector_config, head.vocab_size, head.draft_vocab_size, head.hidden_size)
    for name, shape in needed.items():
        info = tensors.get(name)
        if info is None:
            if name != PROJECTION:
                yield f"{SELECTOR} needs {name}, which is missing: {place}; {SHARPEN_AGAIN}"
            continue
        # A selector that was fitted with a larger target has a predecessor for each of its tokens.
        is_larger = name == PREDECESSORS and info.shape[1:] == shape[1:] and info.shape[0] > shape[0]
        if info.dtype not in FLOATS or not (info.shape == shape or is_larger):
            what = f"{name} is {info.dtype} {list(info.shape)}, this head needs floats {list(shape)}"
            yield f"{what}: {place}; {SHARPEN_AGAIN}"
    scales = {name: tensors[name].shape for name in (EDGE_SCALE, UNARY_SCALE) if name in tensors}
    if len(set(scales.values())) > 1 or any(len(shape) != 1 or not shape[0] for shape in scales.values()):
        shapes = ", ".join(f"{name} is {list(shape)}" for name, shape in scales.items())
        yield f"{shapes}, needs one number a position: {place}; {SHARPEN_AGAIN}"
    if selector_config.selector_top_k > head.draft_vocab_size:
        what = f"{SELECTOR}.selector_top_k is {selector_config.selector_top_k}"
        yield f"{what}, the draft vocabulary has {head.draft_vocab_size} tokens: {head.config_file}; {SHARPEN_AGAIN}"
    if selector_config.head_hash != (this_hash := head_hash(head)):
        which = f"another head (hash {selector_config.head_hash}, this one's is {this_hash})"
        yield f"the candidate selector was fitted to {which}: {place}; {SHARPEN_AGAIN}"
