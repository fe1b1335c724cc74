"""Data sets of the Hugging Face hub, streamed, as sources of documents."""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from value_aware_study.data.documents import Document, Split
from value_aware_study.data.text_files import articles

BYTES_BETWEEN_POSITIONS = 2**24


class HubDocuments:
    """Streams a data set whose rows are documents: the text in column `field`.

    `path` and `name` are those of `datasets.load_dataset` (which since version 4 runs no loading
    script); a local folder laid out like the hub's repository does as well. `splits` maps the
    data set's splits to ours; null leaves the choice to `write_corpus`. With `cache`, a folder,
    rows are kept there as they are read: after a lost connection the next iteration reads the kept
    rows from the disk and continues on the hub behind them. Delete it to read everything anew.
    """

    def __init__(
        self,
        *,
        path: str,
        name: str | None,
        splits: Mapping[str, Split | None],
        field: str,
        cache: str | Path | None = None,
    ) -> None:
        self.path = path
        self.name = name
        self.splits = dict(splits)
        self.field = field
        self.cache = cache

    def __iter__(self) -> Iterator[Document]:
        for hub_split, split in self.splits.items():
            for text in self._texts(self._rows(hub_split)):
                yield Document(text, split)

    def _rows(self, hub_split: str) -> Iterator[str]:
        if self.cache is None:
            yield from self._read(hub_split, _Position())
            return
        with _KeptRows(Path(self.cache) / self._key(hub_split)) as kept:
            yield from kept.read()
            if not kept.complete:
                yield from kept.added(self._read(hub_split, kept.position))

    def _key(self, hub_split: str) -> str:
        """A folder's name: which rows these are, readable, and a hash of all that decides it."""
        what = (self.path, self.name, hub_split, self.field)
        readable = "-".join(str(part).rpartition("/")[2] for part in what[:3] if part)
        return f"{readable}-{sha256(json.dumps(what).encode()).hexdigest()[:8]}"

    def _read(self, hub_split: str, position: "_Position") -> Iterator[str]:
        """Yields the texts behind `position`, which moves with them."""
        rows = position.behind(self._load(hub_split))
        while (row := self._next(rows, hub_split, position)) is not None:
            text = row.get(self.field)
            if not isinstance(text, str):
                columns = ", ".join(row)
                raise ValueError(f"{self.path} has no texts in {self.field!r}, only {columns}")
            position.rows += 1
            yield text

    def _next(
        self, rows: Iterator[dict[str, Any]], hub_split: str, position: "_Position"
    ) -> dict[str, Any] | None:
        try:
            return next(rows, None)
        except Exception as error:  # of whichever HTTP client `datasets` and fsspec use
            kept = f", which are kept in {self.cache}" if self.cache else ""
            raise ConnectionError(
                f"data set {self.path!r}, split {hub_split!r}, stopped after {position.rows:,} rows"
                f"{kept} ({type(error).__name__}: {_first_line(error)}); "
                f"the same command {'continues there' if self.cache else 'starts again'}"
            ) from error

    def _load(self, hub_split: str) -> Any:
        from datasets import load_dataset  # slow to import: the other sources do without

        from value_aware_attention.hugging_face import hub  # as slow

        if not Path(self.path).exists() and not hub.hub_answers():
            raise FileNotFoundError(
                f"data set {self.path!r} is neither a folder here nor reachable on the hub: "
                "the hub does not answer; with a network, the same command continues"
            )
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
    """Streams a data set whose rows are the lines of WikiText: rows are joined into articles."""

    def _texts(self, rows: Iterator[str]) -> Iterator[str]:
        return articles(rows)


class _Position:
    """Tells how far a data set was read, so that reading goes on without a new start."""

    def __init__(self, rows: int = 0, state: dict[str, Any] | None = None) -> None:
        self.rows, self.state = rows, state
        self.dataset: Any = None

    def behind(self, dataset: Any) -> Iterator[dict[str, Any]]:
        self.dataset = dataset
        if self.state is not None:
            dataset.load_state_dict(self.state)
        return iter(dataset)

    def now(self) -> dict[str, Any]:
        if self.dataset is not None:
            self.state = self.dataset.state_dict()
        return {"rows": self.rows, "state": self.state}


class _KeptRows:
    """Keeps texts on the disk, a JSON string a line, and the position of the data set behind them.

    The position is written after the texts, so that a kill leaves at most lines that it does not
    count: they are cut off.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.position_file = folder / "position.json"
        self.file = (folder / "rows.jsonl").open("a+b")
        known = json.loads(self.position_file.read_text()) if self.position_file.exists() else {}
        if known.get("bytes", 0) > self.file.seek(0, 2):  # the disk lost what it had promised
            known = {}
        self.bytes, self.complete = known.get("bytes", 0), known.get("complete", False)
        self.position = _Position(known.get("rows", 0), known.get("state"))
        self.file.truncate(self.bytes)

    def read(self) -> Iterator[str]:
        self.file.seek(0)
        for line in self.file:
            yield json.loads(line)

    def added(self, texts: Iterator[str]) -> Iterator[str]:
        """Yields the texts and keeps them as they pass by."""
        for text in texts:
            self.file.write(json.dumps(text, ensure_ascii=False).encode() + b"\n")
            if self.file.tell() > self.bytes + BYTES_BETWEEN_POSITIONS:
                self._note()
            yield text
        self.complete = True

    def _note(self) -> None:
        from value_aware_attention.files import write_text  # with torch: reading does without

        self.file.flush()
        self.bytes = self.file.tell()
        known = {**self.position.now(), "bytes": self.bytes, "complete": self.complete}
        write_text(self.position_file, json.dumps(known))

    def __enter__(self) -> "_KeptRows":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not ValueError:  # a row that was refused is to be refused again, not skipped
            self._note()
        self.file.close()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
