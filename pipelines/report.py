"""Stage report: one page of the paper's claims, tables and figures, ours beside the paper's.

python -m pipelines.report

The survey and probed models are on it where they were measured.
"""

from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app


@app("report")
def main(cfg: DictConfig) -> None:
    """Writes <report>/index.html, and a .csv, .md and .png of each exhibit."""
    from value_aware_study.report import outputs, write_page
    from value_aware_study.report.caches import cache_section
    from value_aware_study.report.model import model_section
    from value_aware_study.report.pages import report_page
    from value_aware_study.report.results import Results, read_folder

    tokens, benchmark = Path(cfg.tokens), Path(cfg.benchmark)
    trainings = outputs.read_trainings(cfg.training)
    results = Results.of(read_folder(cfg.records), trainings, outputs.read_tokens(tokens))
    survey = outputs.read_survey(
        results.records,
        surveyed=Path(cfg.survey),
        trained=Path(cfg.trained),
        benchmark=benchmark,
    )
    probes = sorted(Path(cfg.probe).glob("*/record.json"))
    probed = [outputs.read_probe(file) for file in probes]
    names = ["model", *(f"model_{place}" for place in range(2, len(probed) + 1))]
    models = [model_section(*one) for one in zip(probed, names, strict=False)]
    caches = [outputs.read_caches(file) for file in sorted(Path(cfg.caches).glob("*.json"))]
    sections = [*([cache_section(caches)] if caches else []), *models]
    folders = (cfg.training, cfg.records, cfg.explored, cfg.survey, cfg.trained, cfg.caches)
    files = [file for folder in folders for file in Path(folder).glob("*.json")]
    unchecked = outputs.unchecked([tokens, benchmark, *probes, *files])
    explored = outputs.read_explored(Path(cfg.explored))
    page = report_page(results, survey, sections, explored, probed, unchecked)
    write_page(page, Path(cfg.report))


if __name__ == "__main__":
    main()
