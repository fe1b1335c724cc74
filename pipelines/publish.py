"""Publishes the run of report/ as results/<scale>, with which later runs are compared.

python -m pipelines.publish [scale=hours] [publish.seed=second] [publish.caches=true]

No other command changes results/<scale>. With a seed it writes the records of that seed alone; with
`publish.caches` results/caches, the page of the records of make caches, which needs no other stage.
"""

import shutil
from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app, write_json


@app("publish")
def main(cfg: DictConfig) -> None:
    """Writes <results>/<scale>: the page, its tables and figures, the summary, the times."""
    if cfg.seed is not None:
        from pipelines.app.seeds import keep

        print(f"{keep(cfg.seed, Path(cfg.outputs), Path(cfg.seeds))} has the records of the seed")
        return
    if cfg.caches:
        print(f"{publish_caches(cfg)} is the published run of caches")
        return
    from pipelines.app.summary import summary
    from pipelines.verdict import CLAIMS, kept
    from value_aware_attention.files import CHECKSUMS, check_checksums, listed, new_folder
    from value_aware_study.paths import SUMMARY, TIMES, inside
    from value_aware_study.report.page import PAGE, pack
    from value_aware_study.report.records import read_folder

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
    with new_folder(published) as folder:
        for file in report.iterdir():
            if file.name in names and file.suffix != ".json":  # the page has the explorer's numbers
                shutil.copy(file, folder)
        (folder / PAGE).write_text(pack(report / PAGE))
        write_json(folder / SUMMARY, {record.model: summary(record) for record in records})
        write_json(folder / TIMES, kept(Path(cfg.outputs, TIMES)))
    print(f"{published} is the published run of this scale")


def publish_caches(cfg: DictConfig) -> Path:
    """Writes <results>/caches, the page of cache methods with its tables and figures."""
    from pipelines.report import origin
    from value_aware_attention.files import new_folder, write_checksums
    from value_aware_study.paths import inside
    from value_aware_study.report.contents import caches_page
    from value_aware_study.report.page import pack, write_page
    from value_aware_study.report.records import read_caches

    outputs, published = Path(cfg.outputs), inside(cfg.results, "caches")
    page = caches_page(*read_caches(outputs / "caches", outputs / "decoded"), origin())
    with new_folder(published) as folder:
        written = write_page(page, folder)
        written.write_text(pack(written))
        write_checksums(folder)
    return published


if __name__ == "__main__":
    main()
