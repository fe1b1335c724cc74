"""A probe of a pretrained model, whose weights come with a package: nothing is downloaded.

python -m pipelines.pretrained [pretrained=smollm2] [probe.windows=8] [probe.search=best]

Writes outputs/<scale>/probe/<model>/, which the report shows.
"""

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app


@app("pretrained")
def main(cfg: DictConfig) -> None:
    """Writes <results>/<model>/: record.json, tables, figures and a page."""
    from pipelines.app.probing import probed
    from value_aware_study.evaluation.pretrained import packaged_model
    from value_aware_study.paths import inside

    folder = packaged_model(cfg, cfg.cache)
    texts = [document.text for source in cfg.texts.values() for document in instantiate(source)]
    probed(
        cfg.probe, folder, texts, name=cfg.model, folder=inside(cfg.results, cfg.model),
        description=cfg.description, named_by="pretrained.model",
    )  # fmt: skip


if __name__ == "__main__":
    main()
