"""Why is acceptance low? Measure it, compare it with the usual shape, and change one thing at a time: a cause is named
only when its change raised the acceptance length.
"""
