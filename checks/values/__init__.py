"""Gives wrong values to the apps: every case of the table cases.tsv.

    python -m checks.values                      # all of it, with the code as it is
    python -m checks.values --before FOLDER      # the same cases in an older checkout
    python -m checks.values --every 20           # some of the cases; writes nothing
    python -m checks.values --having W&B         # the cases with this text; writes nothing

Each case runs in a fork of one process that has imported every app, in a copy of a run at smoke
scale, and counts as ended in one line that names what was given, in another line, in a traceback,
accepted, or without an end within a minute. Writes results/benchmarks/values.json and .md, in which
what --before found stays with its commit; ends with 1 where a case of today's came out wrong.
"""

from checks.values.suite import main

__all__ = ["main"]
