"""Counts how draft steps run, and carries the counts in vLLM's statistics. Imports no vLLM."""

from typing import Any

RAN_AS = {"FULL": "graph", "PIECEWISE": "piecewise", "NONE": "eager"}  # by vLLM's names, ``CUDAGraphMode``
MODES = tuple(RAN_AS.values())
COUNTS = (*MODES, "rows", "padding_rows")
SIZES = ("graphs", "buffer_bytes")

# vLLM sends only declared statistics to its front ends. This one is a dict[str, int] whose readers skip unknown keys,
# in an API server without this plugin too; vLLM's Rust front end does not read it.
CARRIER = "num_kv_fetch_reqs_by_stage"
PREFIX = "peagle_draft_"


class DraftStats:
    """Draft steps of one worker since they were last taken. Every rank may count; one of them reports."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.sizes: dict[str, int] = {}
        """What the drafter holds, by the names in ``SIZES``; goes out once, with the first counts."""

    def note(self, cudagraph_mode: str, rows: int, padding_rows: int) -> None:
        """Count one draft step that serves requests; dummy steps are none.

        Args:
            cudagraph_mode: how the drafter ran, a key of ``RAN_AS``.
            rows: rows of the requests in the draft batch.
            padding_rows: rows computed beside them, to fill up a graph or to match other data parallel ranks.
        """
        counts = self._counts
        counts[RAN_AS[cudagraph_mode]] += 1
        counts["rows"] += rows
        counts["padding_rows"] += padding_rows

    def take(self) -> dict[str, int]:
        """What was counted since the last call, by the names in ``COUNTS``; names that count nothing are left out."""
        taken = {name: int(count) for name, count in self._counts.items() if count}
        if taken:
            self._counts = dict.fromkeys(COUNTS, 0)
            taken |= self.sizes
            self.sizes = {}
        return taken


def load(counts: dict[str, int], scheduler_stats: Any) -> None:
    """Let vLLM's ``SchedulerStats`` carry what ``DraftStats.take`` gave."""
    getattr(scheduler_stats, CARRIER).update({PREFIX + name: count for name, count in counts.items()})


def unload(scheduler_stats: Any) -> dict[str, int]:
    """What ``load`` put there; afterwards the statistics are vLLM's own again."""
    carried = getattr(scheduler_stats, CARRIER)
    return {name: carried.pop(PREFIX + name) for name in (*COUNTS, *SIZES) if PREFIX + name in carried}
