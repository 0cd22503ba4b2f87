"""``peagle-vllm diagnose --url``: a running server's counters."""

import urllib.request
from collections import Counter
from http.client import HTTPException

from peagle_tools.shared.acceptance import PREFIX, Acceptance
from peagle_tools.shared.errors import ToolError


def counts_of(url: str) -> Acceptance:
    """Since the server started, over all its engines. ToolError where it has none."""
    from prometheus_client.parser import text_string_to_metric_families  # comes with vLLM

    try:
        with urllib.request.urlopen(f"{url.rstrip('/').removesuffix('/metrics')}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, HTTPException, ValueError) as error:
        raise ToolError(f"{url}/metrics cannot be read ({error}); is the server up, and is this its root?") from None
    counts: Counter[tuple[str, str | None]] = Counter()
    for sample in (sample for family in families for sample in family.samples):
        counts[sample.name.removeprefix(PREFIX), sample.labels.get("position")] += int(sample.value)
    per_position = "accepted_tokens_per_pos_total"
    num_k = sum(name == per_position for name, _ in counts)
    if not num_k:
        why = "it does not speculate, or has --disable-log-stats"
        raise ToolError(f"{url}/metrics has no vllm:spec_decode counters: {why}")
    return Acceptance(counts["drafts_total", None], tuple(counts[per_position, str(i)] for i in range(num_k)))
