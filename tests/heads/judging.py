"""Judging written heads, and the changes that tests make to them before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peagle_vllm.heads.check_weights import expected_shapes
from peagle_vllm.heads.checks import Problem, check_pair
from peagle_vllm.heads.config import AUX_KEY, default_aux_layers
from peagle_vllm.heads.fields import TRAINED_DEPTH, vllm_fields
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import Target
from tests.heads.writers import HIDDEN, TARGET, Written

Change = Callable[[Written], object]


def put(name: str, make: Callable[[Any], Any]) -> Change:
    """``make``: of the tensor, what stands in its place."""
    return lambda head: head.tensors.update({name: make(head.tensors.get(name))})


def setting(**fields: object) -> Change:
    return lambda head: head.config.update(fields)


def layer_setting(**fields: object) -> Change:
    return lambda head: head.layer_config.update(fields)


def problems(head: Written, folder: Path, target: Target = TARGET, k: int = 5) -> list[Problem]:
    problems = check_pair(read_head(head.save(folder)), target, num_speculative_tokens=k)
    for problem in problems:
        assert "\n" not in problem.line
        assert len(problem.line) < 600
    return problems


def meaning(folder: Path) -> dict[str, Any]:
    """All that serving takes from a head's config. Not ``max_position_embeddings``: vLLM takes the target's."""
    head = read_head(folder)
    left_out = ("architectures", "max_position_embeddings", TRAINED_DEPTH)
    fields = {key: value for key, value in vllm_fields(head).items() if key not in left_out}
    aux_layers = list(head.aux_layer_ids or default_aux_layers(TARGET.num_layers))
    return fields | {"family": head.family, "shapes": expected_shapes(head), AUX_KEY: aux_layers}


def only(problems: list[Problem], severity: str = "error") -> str:
    assert [problem.severity for problem in problems] == [severity], problems
    return problems[0].line


def norm_before_fc(head: Written) -> None:
    head.config["norm_before_fc"] = True
    head.tensors["input_norm.weight"] = torch.rand(3 * HIDDEN)


def fc_norm(head: Written) -> None:
    head.layer_config["fc_norm"] = True
    head.tensors |= {f"fc_norm.{i}.weight": torch.rand(HIDDEN) for i in range(3)}  # a mix-up shows


def top_fc_norm(head: Written) -> None:
    """Where the speculators library writes it; vLLM looks into transformer_layer_config."""
    fc_norm(head)
    head.config["fc_norm"] = head.layer_config.pop("fc_norm")


def windowed(head: Written) -> None:
    head.layer_config.update(layer_types=["full_attention", "sliding_attention"], sliding_window=8)
