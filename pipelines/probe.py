"""How many keys the attention of a trained model needs, on a text: any language model or encoder.

python -m pipelines.probe model=PATH_OR_NAME text=FILE_OR_hub:NAME [probe.search=fast] \\
    [probe.windows=16] [probe.length=256] [kernel=elu] [tokenizer=FOLDER] [caches=true]

Writes outputs/<scale>/probe/<name>/, which no stage of dvc.yaml reads.
"""

from omegaconf import DictConfig

from pipelines.app import app

SHORT = ("model", "text", "tokenizer", "caches")
"""Arguments that stand for probe.<name>."""


@app("probe", short=SHORT)
def main(cfg: DictConfig) -> dict[str, object]:
    """Writes <results>/<name>/, and returns a row for a multirun's table."""
    from pipelines.app.probing import probed
    from value_aware_attention.hugging_face.saved import short_name
    from value_aware_study.data.text import documents
    from value_aware_study.paths import inside

    name = cfg.name or short_name(cfg.model)
    if not name:
        raise ValueError(f"model is {cfg.model}; its folder has no name: give probe.name=<name>")
    texts = [document.text for document in documents(cfg.text)]
    return probed(cfg, cfg.model, texts, name=name, folder=inside(cfg.results, name))


if __name__ == "__main__":
    main()
