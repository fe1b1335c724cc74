"""Publishes the run that was made last: results/<scale> becomes what report/ shows.

python -m pipelines.publish [paths.outputs=outputs/hours paths.report=outputs/hours/report]

The only command that changes results/<scale>. Later runs of the scale are compared with it.
"""

import gzip
import shutil
from base64 import b64encode
from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app, write_json
from pipelines.summary import summary
from pipelines.verdict import CLAIMS, SUMMARY, TIMES, kept
from value_aware_attention.storage import new_folder
from value_aware_study.paths import inside
from value_aware_study.report.results import read_folder

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
    with new_folder(published) as folder:
        shutil.copytree(report, folder, dirs_exist_ok=True)
        page = gzip.compress((report / "index.html").read_bytes(), mtime=0)
        (folder / "index.html").write_text(PACKED.replace("{}", b64encode(page).decode()))
        write_json(folder / SUMMARY, {record.model: summary(record) for record in records})
        write_json(folder / TIMES, kept(Path(cfg.seconds)))
    print(f"{published} is the published run of this scale")


if __name__ == "__main__":
    main()
