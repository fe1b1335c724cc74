"""How many keys the attention of a trained model needs, on a text: any language model or encoder.

python -m pipelines.probe model=PATH_OR_NAME text=FILE_OR_hub:NAME [probe.search=fast] \\
    [probe.windows=16] [probe.length=256] [kernel=elu] [tokenizer=FOLDER] [caches=true]

Writes outputs/<scale>/probe/<name>/, which no stage of dvc.yaml reads.
"""

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from pipelines.app import app

SHORT = ("model", "text", "tokenizer", "caches")
"""Arguments that stand for probe.<name>."""


@app("probe", short=SHORT)
def main(cfg: DictConfig) -> dict[str, Any]:
    """Writes <results>/<name>/, and returns a row for a multirun's table."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from pipelines.app.probed_text import documents
    from pipelines.app.probing import probed
    from value_aware_attention.models.checkpoints import load_model, load_tokenizer
    from value_aware_study.paths import inside

    disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; ours is one line
    name = cfg.name or Path(cfg.model).resolve().name
    if not name:
        raise ValueError(f"model is {cfg.model}; its folder has no name: give probe.name=<name>")
    folder = inside(cfg.results, name)
    texts = [document.text for document in documents(cfg.text)]
    tokenizer = load_tokenizer(cfg.tokenizer or cfg.model)
    model = load_model(cfg.model, dtype=getattr(torch, cfg.dtype) if cfg.dtype else None)
    return probed(cfg, model, tokenizer, texts, checkpoint=cfg.model, name=name, folder=folder)


if __name__ == "__main__":
    main()
