"""The text that a probe reads: local files, or a data set of the Hugging Face hub."""

import re
from collections.abc import Iterable
from pathlib import Path

from value_aware_study.data.text import Document, HubDocuments, TextFiles

HUB = "hub:"
DATA_SET = re.compile(r"hub:(?P<name>[^:]+)(:(?P<split>[^:[]+(\[[^]]*\])?)(:(?P<column>[^:]+))?)?")


def documents(given: str) -> Iterable[Document]:
    """Reads files, or hub:NAME[:SPLIT[:COLUMN]], by default the column text of the split test.

    NAME is that of a data set, with its configuration after a second slash, or a local folder laid
    out as one. SPLIT may be a part, such as test[:500]. Raises ValueError for another form.
    """
    if not given.startswith(HUB):
        return TextFiles(given)
    found = DATA_SET.fullmatch(given)
    if found is None:
        raise ValueError(f"text is {given}; a data set is hub:NAME[:SPLIT[:COLUMN]]")
    name, split, column = found["name"], found["split"] or "test", found["column"] or "text"
    path, configuration = name, None
    if name.count("/") == 2 and not Path(name).exists():
        path, _, configuration = name.rpartition("/")
    return HubDocuments(path=path, name=configuration, splits={split: None}, field=column)
