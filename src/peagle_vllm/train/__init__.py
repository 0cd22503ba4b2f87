"""Training of P-EAGLE heads on speculators' models and losses, whose memory does not grow with the number of depths.

``partition`` (which rows there are, and what each may look at) -> ``head`` (speculators' model, its forward in parts).
Serving never imports this package; it needs ``peagle-vllm[train]``.
"""
