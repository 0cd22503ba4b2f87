"""A GPU's first half hour: what to run on a machine that is there for minutes, most valuable first.

``parts`` lists what runs, ``running`` runs it (each part a process with its own limit; results after every part;
resumed where it was cut off), ``page`` turns the results into one page.
"""
