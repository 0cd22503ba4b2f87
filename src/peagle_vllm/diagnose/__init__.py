"""Why is acceptance low? Measure it, compare it with the usual shape, and where it looks wrong change one thing at a
time: a cause is named only when mending it raised the acceptance length.

prompts.py        what the pair is measured with
interventions.py  the one thing that may be changed
search.py         which acceptance is usual, and which changes help
engine.py         measuring a setup in vLLM
report.py         for people and for machines
"""
