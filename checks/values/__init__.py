"""Gives wrong values to the apps: every case of the table cases.tsv.

    python -m checks.values                  # all of it
    python -m checks.values --having W&B     # the cases with this text; writes nothing

The table holds what somebody found, and a case for each rule. Each runs in a fork of one process
that has imported every app, in a copy of a run at smoke scale, and counts as ended in one line that
names what was given, in another line, in a traceback, accepted, or without an end within a minute.
Writes results/benchmarks/values.json and .md; ends with exit code 1 where a case came out wrong.
"""
