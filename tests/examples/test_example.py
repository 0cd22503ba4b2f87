"""example.py runs on the tiny pair."""

import re
import subprocess
import sys

import pytest
import torch

from peagle_tools.shared.engines import quick_dtype
from tests.support.serving import ROOT, environment


def test_example() -> None:
    # In one process, where three would import vLLM.
    env = environment() | {"TARGET": "tiny", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("--- 'def ") == 2
    length = re.search(r"acceptance length (\S+) over (\d+) drafts", done.stdout)
    assert length and float(length[1]) > 1.5


def test_dtype_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    slow, arm = {"architecture": "x86_64", "avx512_bf16": False}, {"architecture": "aarch64"}
    for cpu, dtype in ((slow, "float32"), (slow | {"avx512_bf16": True}, "bfloat16"), (arm, "bfloat16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda cpu=cpu: cpu)
        assert quick_dtype() == dtype
