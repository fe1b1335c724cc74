"""Counts the keys that the attention of any trained language model or encoder needs on a text.

python -m pipelines.probe model=PATH_OR_NAME text=FILE_OR_hub:NAME [probe.search=fast] \\
    [probe.windows=16] [probe.length=256] [kernel=elu] [tokenizer=FOLDER] [caches=true]
python -m pipelines.probe pretrained=smollm2

Writes outputs/<scale>/records/probe/<name>/, which the report reads.
"""

from omegaconf import DictConfig

from pipelines.app import app

SHORT_ARGUMENTS = ("model", "text", "tokenizer", "caches")


@app("probe", short=SHORT_ARGUMENTS)
def main(cfg: DictConfig) -> dict[str, object]:
    """Writes <results>/<name>/, and returns a row for a multirun's table."""
    card = cfg.pretrained
    if bool(cfg.model) == bool(card):
        raise ValueError(
            f"probe.model is {cfg.model}, pretrained {card and card.name}; give one of them: "
            f"model=<folder or name>, or pretrained=<option>"
        )
    if not (cfg.text or card):
        raise ValueError("probe.text is missing: give probe.text=<value>")
    from pipelines.app.probing import probed
    from value_aware_attention.hugging_face.saved import short_name
    from value_aware_study.evaluation.pretrained import packaged_model, texts_of
    from value_aware_study.safe_text import inside

    if not (name := cfg.name or (card.model if card else short_name(cfg.model))):
        raise ValueError(f"model is {cfg.model}; its folder has no name: give probe.name=<name>")
    return probed(
        cfg, packaged_model(card, cfg.cache) if card else cfg.model,
        texts_of(cfg.text, card),
        name=name, folder=inside(cfg.results, name),
        description="" if cfg.text else card.description,
    )  # fmt: skip


if __name__ == "__main__":
    main()
