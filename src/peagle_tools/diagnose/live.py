"""What the counters of a running server say: vLLM's acceptance by position."""

import urllib.request

from peagle_tools.diagnose.search import FEW, oddities
from peagle_tools.shared.acceptance import Acceptance, read_metrics


def fetch(url: str) -> str:
    """The text of ``/metrics``. Raises OSError or ValueError where there is none."""
    with urllib.request.urlopen(f"{url.rstrip('/').removesuffix('/metrics')}/metrics", timeout=10) as answer:
        return answer.read().decode()


def read(metrics: str) -> tuple[Acceptance, list[str]] | None:
    """Acceptance since the server started, and what it means, a line each; None where the server does not speculate."""
    seen = read_metrics(metrics)
    if seen is None:
        return None
    meaning = oddities(seen)
    if seen.num_drafts < FEW:
        meaning.append(f"{seen.num_drafts} drafts so far, too few to judge: send it some requests")
    return seen, meaning
