"""One thin Hydra app per stage of dvc.yaml."""

import os
import sys
from pathlib import Path

# `dvc exp run --temp` and `--queue` run a copy of the tree: its own library must win over an
# installed one.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

# OpenMP's idle threads spin by default, which stops a machine that has anything else to do: a
# training step on two shared cores took three times as long. It must be set before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
