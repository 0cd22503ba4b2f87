"""What the counters of a running server say: vLLM's acceptance by position, and how this package's drafts ran."""

import urllib.request

from peagle_tools.diagnose.search import FEW, oddities
from peagle_tools.shared.acceptance import Acceptance, read_draft_steps, read_metrics

MUCH_EAGER = 0.1  # of the draft steps


def fetch(url: str) -> str:
    """The text of ``/metrics``. Raises OSError or ValueError where there is none."""
    with urllib.request.urlopen(f"{url.rstrip('/').removesuffix('/metrics')}/metrics", timeout=10) as answer:
        return answer.read().decode()


def read(metrics: str) -> tuple[Acceptance, list[str]] | None:
    """Acceptance since the server started, and what it means, a line each; None where the server does not speculate."""
    seen = read_metrics(metrics)
    if seen is None:
        return None
    steps, meaning = read_draft_steps(metrics), oddities(seen)
    if seen.num_drafts < FEW:
        meaning.append(f"{seen.num_drafts} drafts so far, too few to judge: send it some requests")
    if not steps:
        meaning.append("no vllm:peagle_draft_steps: the plugin is not loaded there, or the head is no P-EAGLE head")
    elif steps.eager_share > MUCH_EAGER:
        meaning.append(
            f"{steps.eager_share:.0%} of the draft steps ran without a CUDA graph (docs/troubleshooting.md says when)"
        )
    return seen, meaning
