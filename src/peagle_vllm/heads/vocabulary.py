"""A head's vocabularies: embeddings, output matrix, and the map from draft ids to target ids.

vLLM adds ``d2t`` to the draft id: target id = draft id + d2t[draft id]. A head without the map drafts the first ids of
the target's vocabulary, and one that holds target ids themselves drafts others; neither raises. ``t2d`` marks the
target ids that can be drafted; vLLM does not read it, but it tells the two forms of ``d2t`` apart.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from peagle_vllm.heads.files import INTEGERS, HeadError
from peagle_vllm.heads.head import Head

if TYPE_CHECKING:
    import numpy as np

TARGET_IDS = "d2t holds target ids"  # the one fault that convert mends


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
    try:
        d2t, marked = head.values("d2t"), known_targets(head)
    except HeadError as error:
        return str(error)
    if d2t is None:
        return None
    if head.is_reduced:
        form, fault = form_of_d2t(d2t, marked, head.vocab_size)
        if fault:
            return f"d2t {fault}: {file}; store it as offsets (target id - draft id)"
        mend = (
            f"{TARGET_IDS}, and vLLM adds it to the draft ids: {file}; store it as offsets (peagle-vllm convert does)"
        )
        return mend if form == "target ids" else None
    if d2t.any() and not np.array_equal(d2t, np.arange(rows)):
        return (
            f"d2t maps tokens, and draft_vocab_size equals vocab_size ({head.vocab_size}), where vLLM uses no map: "
            f"{file}; remove d2t, or correct the sizes in config.json"
        )
    return None


def form_of_d2t(
    d2t: "np.ndarray", marked: "np.ndarray | None", vocab_size: int
) -> tuple[Literal["offsets", "target ids"] | None, str | None]:
    """Which of the two forms a map has, or what is wrong with it: (form, None) or (None, fault).

    Args:
        d2t: whole numbers [draft vocabulary].
        marked: the target ids that ``t2d`` marks, ascending; None where the head has no usable one.
    """
    import numpy as np

    as_ids = d2t.astype(np.int64)
    as_offsets = as_ids + np.arange(len(d2t))
    offsets_fault = _fault_of(as_offsets, marked, vocab_size)
    ids_fit = _fault_of(as_ids, marked, vocab_size) is None
    if offsets_fault is None and ids_fit:
        return None, "could be offsets or target ids, and no t2d tells which"
    if offsets_fault is None:
        return "offsets", None
    return ("target ids", None) if ids_fit else (None, offsets_fault)


def target_ids(d2t: "np.ndarray", form: str) -> "np.ndarray":
    """int64 [draft vocabulary], the target id of each draft id."""
    import numpy as np

    ids = d2t.astype(np.int64)
    return ids + np.arange(len(ids)) if form == "offsets" else ids


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


def known_targets(head: Head) -> "np.ndarray | None":
    """The target ids that ``t2d`` marks, ascending, where the head carries a usable one."""
    info = head.tensors.get("t2d")
    if info is None or info.shape != (head.vocab_size,) or info.dtype not in ("BOOL", *INTEGERS):
        return None
    values = head.values("t2d")
    return None if values is None else values.astype(bool).nonzero()[0]
