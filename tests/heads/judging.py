"""Judging written heads, and the changes that tests make to them before."""

from collections.abc import Callable
from pathlib import Path

import torch

from peagle_vllm.heads.checks import Problem, check_pair
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import Target
from tests.heads.writers import HIDDEN, TARGET, Written

AGAIN = "take the head's weights from their source again"
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
Change = Callable[[Written], object]


def problems(head: Written, folder: Path, target: Target = TARGET, k: int = 5) -> list[Problem]:
    problems = check_pair(read_head(head.save(folder)), target, num_speculative_tokens=k)
    for problem in problems:
        assert "\n" not in problem.line
        assert len(problem.line) < 600
    return problems


def only(problems: list[Problem], severity: str = "error") -> str:
    assert [problem.severity for problem in problems] == [severity], problems
    return problems[0].line


def norm_before_fc(head: Written) -> None:
    head.config["norm_before_fc"] = True
    head.tensors["input_norm.weight"] = torch.ones(3 * HIDDEN)


def fc_norm(head: Written) -> None:
    head.layer_config["fc_norm"] = True
    head.tensors |= {f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3)}


def top_fc_norm(head: Written) -> None:
    """Where the speculators library writes it; vLLM looks into transformer_layer_config."""
    fc_norm(head)
    head.config["fc_norm"] = head.layer_config.pop("fc_norm")


def windowed(head: Written) -> None:
    head.layer_config.update(layer_types=["full_attention", "sliding_attention"], sliding_window=8)
