"""A corpus that every installation has: the docstrings of its packages."""

import ast
import gc
import hashlib
import inspect
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from value_aware_study.data.documents import Document

TEST_FOLDERS = {"test", "tests", "testing", "_testing"}
FILES_WORTH_A_POOL = 64


class Docstrings:
    """Reads the docstrings of an installed package: one document per module, in the order of paths.

    The package is found and parsed, never imported; test folders are left out, and a docstring
    that occurs again in the package is kept once. The same version gives the same bytes.
    """

    def __init__(self, *, package: str) -> None:
        self.package = package

    def __iter__(self) -> Iterator[Document]:
        seen: set[bytes] = set()
        for docstrings in _parsed(_modules(self.package)):
            fresh = []
            for docstring in docstrings:
                digest = hashlib.blake2b(docstring.encode(), digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    fresh.append(docstring)
            if fresh:
                yield Document("\n\n".join(fresh))


def docstrings_of(file: Path) -> list[str]:
    """Returns a Python file's docstrings in source order, cleaned; none if it does not parse."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []  # packages ship templates and files for other versions of Python
    return list(_docstrings(tree))


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
        # a lone surrogate is legal in a Python literal and cannot be written as UTF-8
        if text := text.encode(errors="ignore").decode().replace("\0", "").strip():
            yield text
    # a definition is a statement: expressions, most of the tree, are never entered
    for block in ("body", "orelse", "handlers", "finalbody"):
        children = getattr(node, block, None)
        for child in children if isinstance(children, list) else ():
            yield from _docstrings(child)


def _modules(package: str) -> list[Path]:
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # the parent of a dotted name
        spec = None
    if spec is None:
        raise ValueError(f"package {package!r} is not installed: name one that is")
    if not spec.submodule_search_locations:
        return [Path(spec.origin or "")]
    files = {}
    for location in spec.submodule_search_locations:
        for file in Path(location).rglob("*.py"):
            relative = file.relative_to(location)
            if TEST_FOLDERS.isdisjoint(relative.parts) and not relative.name.startswith("test_"):
                files[relative.as_posix()] = file
    return [files[name] for name in sorted(files)]


def _parsed(files: list[Path]) -> Iterator[list[str]]:
    processes = min(os.cpu_count() or 1, 8)
    if processes == 1 or len(files) < FILES_WORTH_A_POOL:
        yield from map(docstrings_of, files)
        return
    with ProcessPoolExecutor(processes, initializer=_begin) as pool:
        yield from pool.map(docstrings_of, files, chunksize=16)  # in the order of the files


def _begin() -> None:
    """Prepares a worker: it collects no garbage, and ends with its parent, however that ends.

    One that outlived a killed parent would wait for work for ever, and keep the parent's locks.
    """
    gc.disable()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
