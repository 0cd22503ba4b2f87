"""``make demo``: every drafter at its best K on the real target."""
