"""P-EAGLE, parallel-drafting EAGLE, as a first-class drafter in vLLM."""

__version__ = "0.1.0"
