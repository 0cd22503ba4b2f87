"""A GPU's first half hour: what to run on a machine that is lent for minutes, most valuable first.

``parts`` is what runs, ``running`` how (each part a process with its own limit; results after every part; resumed
where it was cut off), ``page`` what is made of the results.
"""
