"""Runs the pipeline up to the page: `python -m pipelines.repro report` by another name.

    python -m pipelines.run scale=gpu
    python -m pipelines.run scale=gpu corpus=local corpus.path=FILE causal.steps=500 logger=none

Without git too. A run that was ended goes on with the same command.
"""

from pipelines.repro import main

if __name__ == "__main__":
    main()
