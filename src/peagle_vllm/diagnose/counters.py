"""vLLM's own counts of what was drafted and accepted, read from an engine in this process."""

from typing import Any

PREFIX = "vllm:spec_decode_num_"


def read_counters(llm: Any) -> dict[str, list[int]]:
    """Counts since the engine started, by their name after ``PREFIX``; one entry, or one for each draft position.

    Args:
        llm: a ``vllm.LLM`` with ``disable_log_stats=False``.
    """
    counts: dict[str, list[int]] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix(PREFIX)
        if name != metric.name:
            counts[name] = list(metric.values) if hasattr(metric, "values") else [metric.value]
    return counts
