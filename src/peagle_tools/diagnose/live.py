"""``peagle-vllm diagnose --url``: a running server's counters."""

import re
import urllib.request
from collections import Counter
from http.client import HTTPException

from peagle_tools.shared.acceptance import PREFIX, Acceptance
from peagle_tools.shared.errors import ToolError

COUNTERS = re.compile(
    rf"^{PREFIX}(?:drafts|accepted_tokens_per_pos)_total" r'\{(?:.*position="(\d+)")?.*\} (\S+)$', re.M
)


def counts_of(url: str) -> Acceptance:
    """Since the server started, over all its engines. ToolError where it has none."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/').removesuffix('/metrics')}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
    except (OSError, HTTPException, ValueError) as error:
        raise ToolError(f"{url}/metrics cannot be read ({error}); is the server up, and is this its root?") from None
    counts: Counter[str] = Counter()  # by position; drafts have none
    for position, value in COUNTERS.findall(metrics):
        counts[position] += int(float(value))
    if len(counts) < 2:
        why = "it does not speculate, or has --disable-log-stats"
        raise ToolError(f"{url}/metrics has no vllm:spec_decode counters: {why}")
    return Acceptance(counts[""], tuple(counts[str(i)] for i in range(len(counts) - 1)))
