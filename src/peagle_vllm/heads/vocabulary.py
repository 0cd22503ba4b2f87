"""A head's vocabularies: embeddings, output matrix, and the map from draft ids to target ids.

vLLM adds ``d2t`` to the draft id: target id = draft id + d2t[draft id]. A head without the map drafts the first ids of
the target's vocabulary, and one that holds target ids themselves drafts others; neither raises. ``t2d`` marks the
target ids that can be drafted; vLLM does not read it, but it tells the two forms of ``d2t`` apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from peagle_vllm.heads.files import INTEGERS
from peagle_vllm.heads.head import Head

if TYPE_CHECKING:
    import numpy as np

TARGET_IDS = "d2t holds target ids"  # the one fault that convert mends


@dataclass(frozen=True)
class Map:
    """``d2t``: the form it is stored in, and the target id of each draft id, int64 [draft vocabulary]."""

    form: Literal["offsets", "target ids"]
    target_ids: "np.ndarray"


def check_vocabulary(head: Head) -> Iterator[str]:
    """One line for each thing that is wrong with the sizes of the vocabularies, or with the map."""
    draft, full = head.draft_vocab_size, head.vocab_size
    again = "take the head's weights from their source again"
    if draft > full:
        yield f"draft_vocab_size is {draft}, more than the {full} of vocab_size: {head.config_file}; correct them"
        return
    for tensor, key, rows in (
        ("lm_head.weight", "draft_vocab_size", draft),
        ("embed_tokens.weight", "vocab_size", full),
    ):
        info = head.tensors.get(tensor)
        if info is not None and info.shape[:1] != (rows,):
            yield (
                f"{tensor} has {info.shape[0] if info.shape else 0} rows, {key} is {rows}: {head.file_of(tensor)}; "
                f'correct "{key}" in config.json'
            )
    if head.is_reduced and not head.has("lm_head"):
        yield (
            f"lm_head is missing, and the target's {full} rows do not fit a draft vocabulary of {draft}: "
            f"{head.file_of('lm_head')}; {again}"
        )
    if "d2t" in head.tensors:
        fault = _fault_of_d2t(head)
        if fault:
            yield fault
    elif head.is_reduced:
        yield f"d2t is missing, and draft_vocab_size {draft} is below vocab_size {full}: {head.file_of('d2t')}; {again}"


def _fault_of_d2t(head: Head) -> str | None:
    import numpy as np

    info, file, rows = head.tensors["d2t"], head.file_of("d2t"), head.draft_vocab_size
    if info.shape != (rows,) or info.dtype not in INTEGERS:
        return (
            f"d2t is {info.dtype} {list(info.shape)}, needs whole numbers [{rows}]: {file}; correct "
            '"draft_vocab_size" in config.json, or take the weights from their source again'
        )
    d2t = head.values("d2t")
    if d2t is None:
        return None
    if head.is_reduced:
        found, fault = read_map(head)
        if fault:
            return f"d2t {fault}: {file}; store it as offsets (target id - draft id)"
        if found and found.form == "offsets":
            return None
        return (
            f"{TARGET_IDS}, and vLLM adds it to the draft ids: {file}; store it as offsets (peagle-vllm convert does)"
        )
    if d2t.any() and not np.array_equal(d2t, np.arange(rows)):
        return (
            f"d2t maps tokens, and draft_vocab_size equals vocab_size ({head.vocab_size}), where vLLM uses no map: "
            f"{file}; remove d2t, or correct the sizes in config.json"
        )
    return None


def read_map(head: Head) -> tuple[Map | None, str | None]:
    """The map of a head with a reduced vocabulary, or what is wrong with it: (map, None) or (None, fault).

    (None, None) where its values are not on this machine.
    """
    import numpy as np

    d2t = head.values("d2t")
    if d2t is None:
        return None, None
    as_ids = d2t.astype(np.int64).reshape(-1)
    as_offsets = as_ids + np.arange(len(as_ids))
    marked = _marked_targets(head)
    offsets_fault = _fault_of(as_offsets, marked, head.vocab_size)
    ids_fit = _fault_of(as_ids, marked, head.vocab_size) is None
    if offsets_fault is None and ids_fit:
        return None, "could be offsets or target ids, and no t2d tells which"
    if ids_fit:
        return Map("target ids", as_ids), None
    return (None, offsets_fault) if offsets_fault else (Map("offsets", as_offsets), None)


def _fault_of(targets: "np.ndarray", marked: "np.ndarray | None", size: int) -> str | None:
    import numpy as np

    if marked is not None and len(marked) != len(targets):
        return f"has {len(targets)} entries where t2d marks {len(marked)} target ids"
    outside = int(((targets < 0) | (targets >= size)).sum())
    if marked is not None and not np.array_equal(np.sort(targets), marked):
        return "leads to other target ids than t2d marks"
    if outside:
        return f"sends {outside} draft ids outside the vocabulary of {size} tokens"
    if len(np.unique(targets)) < len(targets):
        return "sends two draft ids to one target id"
    return None


def _marked_targets(head: Head) -> "np.ndarray | None":
    """The target ids that ``t2d`` marks, ascending, where the head carries a usable one."""
    info = head.tensors.get("t2d")
    if info is None or info.shape != (head.vocab_size,) or info.dtype not in ("BOOL", *INTEGERS):
        return None
    values = head.values("t2d")
    return None if values is None else values.astype(bool).nonzero()[0]
