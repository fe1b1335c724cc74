"""Disturbs every stage: kills, full disks, concurrent starts and damaged files.

    make faults                          # all of it
    python -m checks.faults --quick  # every sixth of the cases; writes nothing
    python -m checks.faults --seed 1 --kinds "full disk"

Runs the stages of the pipeline once at smoke scale in a temporary folder, each in a process of its
own, and then each again, from a seed: killed at random moments, on a disk without room, two at
once, with cut files and changed bits. What comes of it is compared with the undisturbed run, byte
by byte, hidden files too. Writes results/benchmarks/faults.json and .md; ends with 1 where one case
came out wrong.
"""

from checks.faults.suite import main

__all__ = ["main"]
