"""The parts that the apps share; every module beside this folder is a stage or a command."""

from pipelines.app.errors import USER_ERRORS, ending_with_one_line, one_line
from pipelines.app.hydra_app import (
    app,
    check_sweep,
    composed,
    file_hash,
    own_values,
    plain,
    scale_of_params,
    write_json,
)

__all__ = [
    "USER_ERRORS",
    "app",
    "check_sweep",
    "composed",
    "ending_with_one_line",
    "file_hash",
    "one_line",
    "own_values",
    "plain",
    "scale_of_params",
    "write_json",
]
