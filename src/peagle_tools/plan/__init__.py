"""``peagle-vllm plan``: which depth to run, at which concurrency, and when not to speculate at all.

``profile`` (how many draft tokens are accepted) and ``model`` (what a round costs) are pure functions; ``fit`` takes
both from measured cells, ``advice`` derives the depths from them, ``backtest`` compares its depths with published ones,
``show`` and ``page`` print and draw. docs/benchmarking.md derives the model.
"""
