"""Training of P-EAGLE heads on speculators' models and losses, whose memory does not grow with the number of depths.

``partition`` (the rows, and what each attends to) -> ``head`` (speculators' model, its forward in parts); ``config``
(peagle.yaml) -> ``documents`` (with their hidden states) -> ``trainer`` (steps, checkpoints, resume) -> ``cli``.
Serving never imports this package; it needs ``peagle-vllm[train]``.
"""
