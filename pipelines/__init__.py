"""One thin Hydra app per stage of dvc.yaml."""

import sys
from pathlib import Path

# `dvc exp run --temp` and `--queue` run a copy of the tree: its own library must win over an
# installed one.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
