"""Stage report: one page of the paper's claims, tables and figures, ours beside the paper's.

python -m pipelines.report

It has the survey and probed models if they were measured.
"""

from datetime import UTC, datetime
from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app


@app("report")
def main(cfg: DictConfig) -> None:
    """Writes <report>/index.html, and a .csv, .md and .png of each exhibit; logs what it shows."""
    from pipelines.app import tracking
    from value_aware_study.report import contents, records
    from value_aware_study.report.page import write_page

    places = {str(name): Path(place) for name, place in cfg.items() if name != "run"}
    page = contents.report_page(records.read(places), origin())
    write_page(page, Path(cfg.report))
    with tracking.tracked(cfg, "report", "page") as run:
        tracking.log_page(run, page, Path(cfg.report))


def origin() -> str:
    """Returns the commit of the code with its date, "" outside of a repository."""
    import pygit2

    try:
        commit = pygit2.Repository(".").head.peel(pygit2.Commit)
    except (pygit2.GitError, KeyError):
        return ""
    day = datetime.fromtimestamp(commit.commit_time, UTC)
    return f"commit {str(commit.id)[:10]} of {day:%Y-%m-%d}"


if __name__ == "__main__":
    main()
