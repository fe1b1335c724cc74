"""Holds the table of wrong values and valid extremes, for tests/test_values.py.

A row of the kind "while it runs" gets a fork of one process that has imported every app, in a copy
of a run at smoke scale.
"""
