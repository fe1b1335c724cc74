"""Sources of documents: local files, docstrings of installed packages, data sets of the hub.

Nothing here imports torch, and only a hub data set imports `datasets`, so that the corpus stage
starts at once.
"""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from unittest.mock import patch

from value_aware_attention.texts import articles, read_texts

Split = Literal["train", "validation", "evaluation"]
SPLITS: tuple[Split, ...] = ("train", "validation", "evaluation")


@dataclass(frozen=True)
class Document:
    """A text and its publisher's split; with None, `write_corpus` chooses the split."""

    text: str
    split: Split | None = None


@dataclass(frozen=True)
class TextFiles:
    """Reads local texts with `read_texts`, and prints what it leaves out.

    With `evaluation_path`, `path` is the train split and `evaluation_path` the evaluation split.
    """

    path: str | Path
    evaluation_path: str | Path | None = None
    field: str = "text"

    def __iter__(self) -> Iterator[Document]:
        paths: dict[Split | None, str | Path] = (
            {None: self.path}
            if self.evaluation_path is None
            else {"train": self.path, "evaluation": self.evaluation_path}
        )
        for split, path in paths.items():
            for text in read_texts(path, field=self.field, show=print):
                yield Document(text, split)


@dataclass(frozen=True, kw_only=True)
class Docstrings:
    """Reads the docstrings of an installed package: one document per module, sorted by path.

    The package is parsed, never imported. Test folders are left out, and a docstring that occurs
    several times is kept once. The same version gives the same bytes.
    """

    package: str

    def __iter__(self) -> Iterator[Document]:
        earlier: set[str] = set()
        for docstrings in map(docstrings_of, _modules(self.package)):
            if fresh := [text for text in dict.fromkeys(docstrings) if text not in earlier]:
                earlier.update(fresh)
                yield Document("\n\n".join(fresh))


def docstrings_of(file: Path) -> list[str]:
    """Returns a Python file's docstrings in source order, cleaned; none if it does not parse."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []  # packages ship templates, and files for other versions of Python
    return list(_docstrings(tree))


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
        # a Python literal may hold a lone surrogate, which UTF-8 cannot encode
        if text := text.encode(errors="ignore").decode().replace("\0", "").strip():
            yield text
    # definitions are statements: skip expressions, most of the tree
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
    files = {
        file.relative_to(location).as_posix(): file
        for location in spec.submodule_search_locations
        for file in Path(location).rglob("*.py")
    }
    return [
        file
        for name, file in sorted(files.items())
        if not {"test", "tests", "testing", "_testing"} & set(name.split("/"))
        if not file.name.startswith("test_")
    ]


@dataclass(frozen=True, kw_only=True)
class HubDocuments:
    """Loads a data set of the Hugging Face hub with one document per row, in the column `field`.

    `path` and `name` go to `datasets.load_dataset`, which since version 4 runs no loading script.
    A local folder laid out like the hub's repository works too. `splits` maps the data set's splits
    to ours; with null, `write_corpus` chooses. `cache` is the folder of the loaded data set; None =
    that of `datasets`. Downloaded files stay in the hub's own cache: after a lost connection the
    next iteration downloads only the missing ones. A data set that was loaded once is read without
    the hub.
    """

    path: str
    name: str | None
    splits: Mapping[str, Split | None]
    field: str
    cache: str | Path | None = None

    def __iter__(self) -> Iterator[Document]:
        for hub_split, split in self.splits.items():
            for text in self._rows(hub_split):
                yield Document(text, split)

    def _rows(self, hub_split: str) -> Iterator[str]:
        for row in self._load(hub_split):
            if not isinstance((text := row.get(self.field)), str):
                raise ValueError(
                    f"{self.path} has no texts in {self.field!r}, only {', '.join(row)}"
                )
            yield text

    def _load(self, hub_split: str) -> Iterable[Mapping[str, object]]:
        import datasets  # slow, and only this source needs it

        from value_aware_attention.hugging_face.saved import hub_answers  # slow too

        silent = not Path(self.path).exists() and not hub_answers()
        options = {"split": hub_split, "cache_dir": self.cache and str(self.cache)}
        name = f"data set {self.path!r}, name {self.name!r}, split {hub_split!r}"
        try:
            # without an answer from the hub, its client would retry for minutes
            with patch("datasets.config.HF_HUB_OFFLINE", silent or datasets.config.HF_HUB_OFFLINE):
                # sizes in a data set's card may be out of date
                return datasets.load_dataset(
                    self.path, self.name, verification_mode="no_checks", **options
                )
        except (FileNotFoundError, ConnectionError) as error:
            later = "the hub does not answer; with a network, the same command continues"
            raise FileNotFoundError(
                f"data set {self.path!r} is neither a folder here nor reachable on the hub: "
                + (later if silent else _first_line(error))
            ) from None
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{name} cannot be loaded: {_first_line(error)}") from None
        except Exception as error:  # from any HTTP client of `datasets`
            raise ConnectionError(
                f"{name}, stopped ({type(error).__name__}: {_first_line(error)}); "
                "the same command continues with the files that are missing"
            ) from error


class HubArticles(HubDocuments):
    """Loads a data set with the lines of WikiText as rows, and joins them into articles."""

    def _rows(self, hub_split: str) -> Iterator[str]:
        return articles(super()._rows(hub_split))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


HUB = "hub:"


def documents(source: str) -> Iterable[Document]:
    """Reads files, or hub:NAME[:SPLIT[:COLUMN]]; SPLIT is test and COLUMN is text by default.

    NAME is a data set, with its configuration after a second slash, or a local folder laid out as
    one. SPLIT may be a slice, such as test[:500]. Raises ValueError for another form.
    """
    if not source.startswith(HUB):
        return TextFiles(source)
    split = r"(?P<split>[^:[]+(\[[^]]*\])?)"
    match = re.fullmatch(rf"hub:(?P<name>[^:]+)(:{split}(:(?P<column>[^:]+))?)?", source)
    if match is None:
        raise ValueError(f"text is {source}; a data set is hub:NAME[:SPLIT[:COLUMN]]")
    path, configuration = match["name"], None
    if path.count("/") == 2 and not Path(path).exists():
        path, _, configuration = path.rpartition("/")
    return HubDocuments(
        path=path, name=configuration, splits={match["split"] or "test": None},
        field=match["column"] or "text",
    )  # fmt: skip
