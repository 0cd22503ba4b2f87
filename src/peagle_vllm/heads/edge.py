"""The edge of a sharpened head: config.json's ``candidate_selector`` and the tensors in a folder of their own.

They are DFlash2's names. The tensors lie beside the head's own files, where vLLM, which passes every tensor of a root
folder on to the model, does not look; so a sharpened head still drafts without its edge in stock vLLM.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle_vllm.heads.config import SELECTOR
from peagle_vllm.heads.files import HeadError, TensorInfo, read_headers, read_pieces, shown

if TYPE_CHECKING:
    from peagle_vllm.heads.head import Head

FOLDER = "edge"
PREDECESSORS = "candidate_selector.predecessor_codebook"  # [target vocabulary, rank]
SUCCESSORS = "candidate_selector.successor_codebook"  # [draft vocabulary, rank]
PROJECTION = "candidate_selector.hidden_projection.weight"  # [rank, hidden_size]; absent: the edge has no gate
EDGE_SCALE = "candidate_selector.edge_scale"  # [positions] float32
UNARY_SCALE = "candidate_selector.unary_scale"  # [positions] float32
MARKOV = {"markov_w1": PREDECESSORS, "markov_w2": SUCCESSORS}  # DSpark's names
HASHED_BYTES = 1 << 20  # of a tensor


@dataclass(frozen=True)
class Selector:
    """config.json's ``candidate_selector``.

    Attributes:
        selector_rank: columns of the codebooks.
        selector_top_k: candidates a position, M.
        head_hash: ``head_hash`` of the head that the edge was fitted to.
    """

    selector_rank: int
    selector_top_k: int
    head_hash: str


def read_selector(config: Mapping[str, Any], file: str) -> Selector | None:
    """``candidate_selector`` of a head's config; None where it has none.

    Raises:
        HeadError: it is not one; the line names the field.
    """
    found = config.get(SELECTOR)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise HeadError(f"{SELECTOR} is {shown(found)}, needs a JSON object: {file}; sharpen the head again")
    for field in ("selector_rank", "selector_top_k"):
        if type(found.get(field)) is not int or not 1 <= found[field] <= 1024:
            raise HeadError(
                f"{SELECTOR}.{field} is {shown(found.get(field))}, needs 1 to 1024: {file}; sharpen the head again"
            )
    return Selector(found["selector_rank"], found["selector_top_k"], str(found.get("head_hash")))


def edge_name(name: str) -> str:
    """A tensor's name above, for DSpark's too."""
    return MARKOV.get(name.removesuffix(".weight").rpartition(".")[2], name)


def read_edge(folder: Path) -> dict[str, TensorInfo]:
    """The headers of an edge's tensors, by the names above."""
    headers = read_headers(folder / FOLDER) if (folder / FOLDER).is_dir() else {}
    return {edge_name(name): info for name, info in headers.items()}


def head_hash(head: "Head") -> str:
    """Which head this is: names, types and shapes of its tensors, and the content of the small ones.

    Norms and ``mask_hidden`` are small, and no training leaves them as they were. So a head of gigabytes is known in
    milliseconds. Converting a head into another dialect does not change its hash.
    """
    assert head.folder is not None
    digest = hashlib.sha256()
    for name, info in sorted(head.tensors.items()):
        digest.update(f"{name} {info.dtype} {list(info.shape)}\n".encode())
        if info.num_bytes <= HASHED_BYTES:
            for piece in read_pieces(head.folder, info):
                digest.update(piece)
    return digest.hexdigest()[:16]


def edge_faults(head: "Head", target_vocab_size: int) -> Iterator[str]:
    """Why the edge beside a head cannot be served with it. Nothing for a head without one."""
    selector = read_selector(head.config, head.config_file)
    if selector is None or head.folder is None:
        return
    place = f"{head.name}/{FOLDER}"
    tensors, rank = read_edge(head.folder), selector.selector_rank
    wanted: dict[str, tuple[int, ...]] = {
        PREDECESSORS: (target_vocab_size, rank),
        SUCCESSORS: (head.draft_vocab_size, rank),
    }
    if PROJECTION in tensors:
        wanted[PROJECTION] = (rank, head.hidden_size)
    for name, shape in wanted.items():
        if name not in tensors:
            yield f"{SELECTOR} needs {name}, which is missing: {place}; sharpen the head again, or remove {SELECTOR}"
        elif tensors[name].shape != shape:
            yield (
                f"{name} is {list(tensors[name].shape)}, this head and target need {list(shape)}: {place}; "
                f"sharpen the head again, or remove {SELECTOR}"
            )
    if selector.selector_top_k > head.draft_vocab_size:
        yield (
            f"{SELECTOR}.selector_top_k is {selector.selector_top_k}, the draft vocabulary has {head.draft_vocab_size} "
            f"tokens: {head.config_file}; sharpen the head again"
        )
    if selector.head_hash != head_hash(head):
        yield (
            f"the edge was fitted to another head (hash {selector.head_hash}, this is {head_hash(head)}): {place}; "
            f"sharpen this head, or remove {SELECTOR} from {head.config_file}"
        )
