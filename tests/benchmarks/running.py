"""What tests of several benchmarks need."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def is_summary(samples: dict[str, Any], count: int) -> bool:
    """Whether this is ``arms.summary`` of so many samples."""
    return len(samples["samples"]) == count and samples["p10"] <= samples["median"] <= samples["p90"]
