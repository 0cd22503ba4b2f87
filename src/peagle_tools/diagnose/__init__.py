"""Why is acceptance low? Measure it, compare it with the usual shape, and change one thing at a time: a cause is named
only when its change raised the acceptance length.

interventions.py     the one thing that may be changed
search.py            which acceptance is usual, and which changes help
engine.py            measuring setups in one engine
diagnosis_report.py  for people and for machines
"""
