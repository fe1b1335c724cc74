"""Data sets of the Hugging Face hub, streamed, as sources of documents."""

from collections.abc import Iterator, Mapping
from typing import Any

from value_aware_attention.data.documents import Document, Split
from value_aware_attention.data.text_files import articles


class HubDocuments:
    """A data set whose rows are documents: the text in column `field`.

    `path` and `name` are those of `datasets.load_dataset` (which since version 4 runs no loading
    script); a local folder laid out like the hub's repository does as well. `splits` maps the
    data set's splits to ours; null leaves the choice to `write_corpus`.
    """

    def __init__(
        self, *, path: str, name: str | None, splits: Mapping[str, Split | None], field: str
    ) -> None:
        self.path = path
        self.name = name
        self.splits = dict(splits)
        self.field = field

    def __iter__(self) -> Iterator[Document]:
        for hub_split, split in self.splits.items():
            for text in self._texts(self._rows(hub_split)):
                yield Document(text, split)

    def _rows(self, hub_split: str) -> Iterator[str]:
        for row in self._load(hub_split):
            text = row.get(self.field)
            if not isinstance(text, str):
                columns = ", ".join(row)
                raise ValueError(f"{self.path} has no texts in {self.field!r}, only {columns}")
            yield text

    def _load(self, hub_split: str) -> Any:
        from datasets import load_dataset  # slow to import: the other sources do without

        try:
            return load_dataset(self.path, self.name, split=hub_split, streaming=True)
        except (FileNotFoundError, ConnectionError) as error:
            raise FileNotFoundError(
                f"data set {self.path!r} is neither a folder here nor reachable on the hub: "
                + _first_line(error)
            ) from None
        except (ValueError, RuntimeError) as error:
            given = f"data set {self.path!r}, name {self.name!r}, split {hub_split!r}"
            raise ValueError(f"{given} cannot be loaded: {_first_line(error)}") from None

    def _texts(self, rows: Iterator[str]) -> Iterator[str]:
        return rows


class HubArticles(HubDocuments):
    """A data set whose rows are the lines of WikiText: rows are joined into articles."""

    def _texts(self, rows: Iterator[str]) -> Iterator[str]:
        return articles(rows)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
