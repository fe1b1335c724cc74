"""What a causal model of yours loses, and saves, where it decodes with compressed caches.

python -m pipelines.decode model=PATH_OR_NAME text=FILE [decode.parts=[4]]

Writes outputs/<scale>/decoded/<name>.json, which no stage of dvc.yaml reads.
"""

from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app

SHORT = ("model", "text", "tokenizer")
"""Arguments that stand for decode.<name>."""


@app("decode", short=SHORT)
def main(cfg: DictConfig) -> dict[str, Any]:
    """Writes <results>/<name>.json, and returns a row for a multirun's table."""
    from pipelines.app.tracking import log_decoding_record, tracked
    from value_aware_attention.files import save_json
    from value_aware_attention.hugging_face.saved import short_name
    from value_aware_attention.measurement.decoding import measure_decoding
    from value_aware_study.paths import inside

    name = cfg.name or short_name(cfg.model or "")
    file = inside(cfg.results, name, ".json")
    caches = {label: instantiate(cache, _convert_="all") for label, cache in cfg.caches.items()}
    task, prefix = loaded(cfg)
    with tracked(cfg, "decode", name) as run:
        record = measure_decoding(
            task, caches, keep=[1 / share for share in cfg.parts], prefix=prefix, model_name=name,
            task_name=name, description=cfg.description,
        )  # fmt: skip
        log_decoding_record(run, record)
    save_json(file, record.to_json())
    for cell in record.cells:
        print(f"{cell.cache}, {cell.keep:.1%} of the keys: KL {cell.kl.value:.4f} nats a token")
    print(file)
    return {"model": name, **{f"{cell.cache} {cell.r}": cell.kl.value for cell in record.cells}}


def loaded(cfg: DictConfig) -> tuple[Any, int]:
    """Loads the model on windows of the text; returns the length of their prompts too."""
    import torch

    from value_aware_attention.models.checkpoints import load_model, load_tokenizer
    from value_aware_attention.probe import window_task
    from value_aware_study.data.text import TextFiles

    if cfg.model is None or cfg.text is None:
        raise ValueError("give model=PATH_OR_NAME and text=FILE")
    texts = [document.text for document in TextFiles(cfg.text)]
    tokenizer = load_tokenizer(cfg.tokenizer or cfg.model)
    model = load_model(cfg.model, dtype=getattr(torch, cfg.dtype) if cfg.dtype else None)
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    task, _ = window_task(
        model, tokenizer, texts, windows=cfg.windows, length=cfg.length, kernel=None,
        seed=cfg.seed, draw=False,
    )  # fmt: skip
    if not 2 <= cfg.tokens < task.length:
        raise ValueError(
            f"decode.tokens is {cfg.tokens} of {task.length} tokens (decode.length); it must be 2 "
            f"to {task.length - 1}, so that a prompt is left before them"
        )
    return task, task.length - cfg.tokens


if __name__ == "__main__":
    main()
