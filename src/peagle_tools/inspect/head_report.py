"""What ``inspect`` says of a head: as data (``report``), which JSON is, and as a table of it for people (``show``).

A field is never removed or given another meaning without a new ``SCHEMA``; new fields may come.
"""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from peagle_vllm.heads.checks import Problem
from peagle_vllm.heads.config import default_aux_layers
from peagle_vllm.heads.fields import windows
from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import Head, read_map
from peagle_vllm.heads.selector import read_selector_config
from peagle_vllm.heads.target import Target, Token

SCHEMA = 5


def report(
    head: Head, problems: Sequence[Problem], target: Target | None = None, token: Token | None = None
) -> dict[str, Any]:
    """The report's fields, ready for JSON. None is what is unknown, missing, or not on this machine.

    Args:
        token: what the target's tokenizer calls the head's mask token.
    """
    ids = head.aux_layer_ids or (target and default_aux_layers(target.num_layers))
    mask_hidden = head.tensors.get("mask_hidden")
    fit = all(problem.severity != "error" for problem in problems)
    types, window = windows(head) if fit else (None, None)
    selector = None
    with suppress(HeadError):  # what cannot be read is a problem of its own
        selector = read_selector_config(head.config, head.config_file)
    repo = head.folder.absolute().parents[1].name if head.folder and head.commit else ""
    is_cached = repo.startswith("models--")  # .../models--org--name/snapshots/COMMIT, which no other machine has
    name = repo.removeprefix("models--").replace("--", "/") if is_cached else head.name
    config = {"method": "eagle3", "model": name, "parallel_drafting": True}
    config |= {"num_speculative_tokens": min(head.trained_depth or 5, 5)}
    return {
        "schema": SCHEMA,
        "head": name,  # its folder, or its name on the hub
        "commit": head.commit,  # of the hub; None for a folder outside the hub's cache
        "kind": head.kind,  # peagle, eagle3, or target for a plain model
        "architecture": head.architecture,  # the class that vLLM looks up
        "family": head.family,  # llama or qwen3: the layers; None for a class that cannot draft in parallel
        "layers": head.num_layers,
        "windowed_layers": types.count("sliding_attention") if types else None,
        "sliding_window": window,  # of those layers, in tokens
        "hidden_size": head.hidden_size,
        "target_hidden_size": head.target_hidden_size,
        "vocab_size": head.vocab_size,  # of the target
        "draft_vocab_size": head.draft_vocab_size,  # tokens that can be drafted
        "vocabulary_map": read_map(head).form,  # of d2t: none, identity, offsets, target ids, unclear
        "aux_layers": list(ids) if ids else None,  # whose input vLLM captures; None: depends on a target not given
        "aux_key": head.aux_key,  # their field; None for vLLM's default
        "aux_count": head.aux_needed,  # how many fc takes
        "mask_token": head.mask_token_id if isinstance(head.mask_token_id, (int, str)) else None,
        "mask_token_key": head.mask_token_key,  # its field
        "mask_token_text": token.text if token else None,  # in the target's tokenizer
        "mask_token_kind": token.kind if token else None,  # of ``heads.target.Token``
        "mask_hidden": f"{mask_hidden.dtype} {list(mask_hidden.shape)}" if mask_hidden else None,
        "trained_depth": head.trained_depth,  # tokens drafted ahead in training
        "norms": [name for name, is_on in head.norms.items() if is_on],  # that a head may have or not
        "tensors": len(head.tensors),
        "parameters": sum(info.num_elements for info in head.weights.values()),
        "bytes": sum(info.num_bytes for info in head.tensors.values()),
        "dtypes": sorted({info.dtype for info in head.tensors.values()}),
        "from_target": [name for name in ("embed_tokens", "lm_head") if not head.has(name)],
        "selector": selector and {"rank": selector.selector_rank, "candidates": selector.selector_top_k},
        "target": target.name if target else None,
        "speculative_config": config | ({"revision": head.commit} if is_cached or not head.folder else {}),
        "problems": [asdict(problem) for problem in problems],
        "fit": fit,
    }


def show(console: Console, data: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in data.items():
        if value is not None and name not in ("schema", "speculative_config", "problems", "fit"):
            table.add_row(name.replace("_", " "), Text(value if isinstance(value, str) else json.dumps(value)))
    console.print(table)
    console.print()
    if data["fit"]:
        config = shlex.quote(json.dumps(data["speculative_config"]))
        console.print("Serve it with", highlight=False)
        console.print(f"--speculative-config {config}\n", style="bold", highlight=False, soft_wrap=True, markup=False)
    for problem in data["problems"]:
        error = problem["severity"] == "error"
        mark = Text("unfit    " if error else "warning  ", "bold red" if error else "yellow")
        console.print(mark + Text(problem["line"], "default"), soft_wrap=True, highlight=False)
    fits = f"fits {data['target']}" if data["target"] else "sound; --target checks it against its target"
    if data["fit"]:
        console.print(Text(fits, "green"), soft_wrap=True)
