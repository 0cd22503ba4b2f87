"""``peagle-vllm plan``: which depth to run, at which concurrency, and when not to speculate at all.

``acceptance`` (how many draft tokens are accepted) and ``model`` (what a round costs) are pure functions; ``fit``
takes both from measured cells, ``advice`` answers questions with them, ``published`` tries them on published
figures. docs/benchmarking.md derives the model.
"""
