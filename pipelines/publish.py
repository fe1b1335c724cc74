"""Publishes the run of report/ as results/<scale>, with which later runs are compared.

python -m pipelines.publish [scale=hours]

No other command changes results/<scale>.
"""

import gzip
import re
import shutil
from base64 import b64decode, b64encode
from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app, write_json
from pipelines.summary import summary
from pipelines.verdict import CLAIMS, SUMMARY, TIMES, kept
from value_aware_attention.files import (
    CHECKSUMS,
    check_checksums,
    listed,
    new_folder,
    reading,
    write_checksums,
)
from value_aware_study.paths import inside
from value_aware_study.report.page import ENDINGS, PAGE
from value_aware_study.report.records import read_folder

PACKED = """<!DOCTYPE html>
<meta charset="utf-8">
<title>Value-aware approximate attention: a published run</title>
<noscript>The page needs JavaScript; its tables and figures are beside this file.</noscript>
<script type="module">
const packed = Uint8Array.from(atob("{}"), (character) => character.charCodeAt(0));
const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const page = await new Response(stream).text();
document.open();
document.write(page);
document.close();
</script>
"""
"""A page that unpacks itself: a quarter of its size in git."""


@app("publish")
def main(cfg: DictConfig) -> None:
    """Writes <results>/<scale>: the page, its tables and figures, the summary, the times."""
    records, report = read_folder(cfg.records), Path(cfg.report)
    if not (report / CLAIMS).exists():
        raise FileNotFoundError(f"{report} holds no report; make repro writes it")
    scale = records[0].scale
    if scale != cfg.scale:
        raise ValueError(f"{cfg.records} holds records of scale {scale}; scale is {cfg.scale}")
    published = inside(cfg.results, scale)
    again = "make the report again (python -m pipelines.report)"
    if not (names := listed(report)):
        raise ValueError(f"{report} has no {CHECKSUMS}, the list of its page's files: {again}")
    check_checksums(report, again)
    check_published(published)
    with new_folder(published) as folder:
        for file in report.iterdir():
            if file.name in names:
                shutil.copy(file, folder)
        page = gzip.compress((report / PAGE).read_bytes(), mtime=0)
        (folder / PAGE).write_text(PACKED.replace("{}", b64encode(page).decode()))
        write_json(folder / SUMMARY, {record.model: summary(record) for record in records})
        write_json(folder / TIMES, kept(Path(cfg.seconds)))
    print(f"{published} is the published run of this scale")


def check_published(folder: Path) -> None:
    """Raises ValueError where a folder holds a file that no publication wrote.

    One that was published before there were lists of files gets its list.
    """
    found = {path.name for path in folder.glob("*")} - {CHECKSUMS}
    if others := sorted(found - set(listed(folder) or unlisted(folder / PAGE))):
        raise ValueError(f"{folder / others[0]} is not of a published run: move it away")
    if found and not listed(folder):
        write_checksums(folder)


def unlisted(page: Path) -> set[str]:
    """The names that the files of a published run may have, by the exhibits of its packed page."""
    if not page.exists():
        return set()
    with reading(page, "move it away"):
        _, packed = page.read_text(encoding="utf-8").split('atob("', 1)
        text = gzip.decompress(b64decode(packed.partition('"')[0])).decode()
    stems = re.findall(r'data-exhibit="(\w+)"', text)
    names = {stem + ending for stem in stems for ending in ENDINGS}
    return {PAGE, SUMMARY, TIMES} | names


if __name__ == "__main__":
    main()
