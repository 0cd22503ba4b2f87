"""``make demo``: every drafter on the tiny models, one process each."""
