"""Stores computed records on disk, named by the sha256 of their inputs and their code."""

import ast
import json
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from value_aware_attention.files import load_json, save_json, to_json

LIBRARY = (__name__.partition(".")[0],)


@cache
def source_hash(*modules: str, packages: tuple[str, ...] = LIBRARY) -> str:
    """Hashes the code of `modules` and of all their imports from `packages`, C++ included.

    It depends only on the result of `code_hashes`. Within a process it stays the same, like the
    imported code.
    """
    hashes = sorted(code_hashes(*modules, packages=packages).items())
    return sha256(repr(hashes).encode()).hexdigest()


def code_hashes(
    *modules: str, packages: tuple[str, ...] = LIBRARY, without: Collection[str] = ()
) -> dict[str, str]:
    """Hashes the syntax tree of each module of the import closure, and C++ files next to it.

    Comments, layout, docstrings, those of constants too, and imports for types change no hash.
    """
    files = import_closure(*modules, packages=packages, without=without)
    hashes = {name: _tree_hash(file.read_bytes()) for name, file in files.items()}
    folders = {file.parent for file in files.values()}
    beside = {
        source for folder in folders for kind in ("*.cpp", "*.h") for source in folder.glob(kind)
    }
    return hashes | {source.name: sha256(source.read_bytes()).hexdigest() for source in beside}


@cache
def _tree(source: bytes) -> ast.Module:
    """Parses source, without docstrings, dots of stubs and imports for types alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # a constant by itself: a docstring, also one below an assignment, or dots
            node.body = [
                statement
                for statement in node.body
                if not (
                    isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                )
            ]
    return tree


@cache
def _tree_hash(source: bytes) -> str:
    return sha256(ast.dump(_tree(source)).encode()).hexdigest()


def import_closure(
    *modules: str, packages: tuple[str, ...] = LIBRARY, without: Collection[str] = ()
) -> dict[str, Path]:
    """Maps `modules`, and everything that they import from `packages`, to their files.

    Imports are read from the source text, also within functions; no code runs. Imports under
    `if TYPE_CHECKING` never run, so they do not count. A name that a package re-exports counts as
    the module it comes from, since the package imports every method. Raises ValueError for a module
    without a source file.
    """
    files: dict[str, Path] = {}
    waiting = set(modules)
    while waiting:
        module = waiting.pop()
        if (file := _file(module)) is None:
            raise ValueError(f"the module is {module!r}; it must have a file of Python source")
        files[module] = file
        waiting |= _imports(file, packages) - set(files) - set(without)
    return files


def defining_module(name: str) -> str:
    """Finds the module that defines the object of a dotted name (a `_target_`)."""
    module, _, inner = name.rpartition(".")
    while module and _file(module) is None:
        module, _, inner = module.rpartition(".")
    return _origin(module, inner)


@cache
def _imports(file: Path, packages: tuple[str, ...]) -> set[str]:
    """Lists the modules of `packages` that a file imports."""
    names: set[str] = set()
    for node in ast.walk(_tree(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages:
            names |= {_origin(str(node.module), alias.name) for alias in node.names}
    return {name for name in names if name.split(".")[0] in packages}


@cache
def _origin(module: str, name: str) -> str:
    """Finds the module that `from module import name` reads: `name` itself, or its origin."""
    if _file(f"{module}.{name}"):
        return f"{module}.{name}"
    file = _file(module)
    if file is None or file.name != "__init__.py":
        return module
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _origin(node.module, alias.name)
    return module


@cache
def _file(module: str) -> Path | None:
    """Finds a module's source from the place of its top-level package."""
    if file := getattr(sys.modules.get(module), "__file__", None):
        return Path(file)
    top, _, inner = module.partition(".")
    spec = find_spec(top)  # imports nothing
    if spec is None or not inner:
        return Path(spec.origin) if spec and spec.has_location and spec.origin else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder, *inner.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.exists():
                return file
    return None


Content = TypeVar("Content")
NAME, RECORD = "name", "record"


class RecordCache:
    """Stores computed records as JSON files, named by a hash of everything that determines them.

    All of them depend on `identity`: data, weights, source, machine. Of several processes only the
    first reads and writes; the others follow it. A file contains its name, so that a file under
    another's name is noticed, and a sha256.
    """

    def __init__(self, folder: Path | str, identity: Mapping[str, object]) -> None:
        self.folder = Path(folder)
        self.identity = dict(identity)

    def get(self, key: Mapping[str, object], compute: Callable[[], Content]) -> Content:
        """Reads the record of `key` from the folder, or computes and stores it.

        A file that changed after writing is removed, with a line in the log, and its record is
        computed again. Raises ValueError, storing nothing, for a record with NaN or infinity.
        """
        # imports torch, which hashes of code do not need
        from value_aware_attention.distributed import broadcast, is_first

        name = sha256(json.dumps(self.identity | dict(key), sort_keys=True).encode()).hexdigest()
        path = self.folder / f"{name}.json"
        records: list[Content] = broadcast(lambda: _read(path))
        if records:
            return records[0]
        record = compute()
        to_json(record)  # rejects NaN in every process, naming its keys
        if is_first():
            save_json(path, json.dumps({NAME: name, RECORD: record}))
        return record


def _read(path: Path) -> list[Any]:
    """Returns [the record] of a file; [] for a missing or damaged file."""
    if not path.exists():
        return []
    try:
        content = load_json(path, NAME, RECORD, remedy="computed again")
        if content[NAME] == path.stem:
            return [content[RECORD]]
        reason = f"{path} has changed since it was written: computed again"
    except ValueError as error:
        reason = str(error)
    logging.getLogger(__name__).warning(reason)
    path.unlink(missing_ok=True)
    return []
