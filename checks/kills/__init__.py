"""Kills every stage at random moments and starts it again.

    make kills                       # all of it
    python -m checks.kills --quick   # every sixth of the cases; writes nothing
    python -m checks.kills --seed 1

Runs the stages of the pipeline once at smoke scale in a temporary folder, each in a separate
process. Then it runs each again, kills it at a moment drawn from a seed and repeats the command.
The folder must then equal that of the undisturbed run byte by byte, hidden files included. Writes
results/benchmarks/kills.json and .md; ends with 1 if a case failed.
"""
