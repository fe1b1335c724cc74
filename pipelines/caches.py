"""Stage caches: compressed caches of a pretrained decoder on prompts that it reads once.

python -m pipelines.caches [kind=running_text|needles|recalled_list] [length=512] ...
"""

from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app, plain
from value_aware_study.data.text import documents

if TYPE_CHECKING:  # they bring torch
    from transformers import PreTrainedTokenizerBase

    from value_aware_attention.decoding.after_prefix import AfterPrefix
    from value_aware_attention.measurement.prompted import Prompt

SHORT = ("text", "text_name", "description", "kind", "length", "keep")
"""Arguments that stand for caches.<name>."""


@app("caches", short=SHORT)
def main(cfg: DictConfig) -> None:
    """Writes <records>/<name>-<text>-<kind>-<length>.json."""
    from pipelines.app.tracking import tracked
    from value_aware_attention.files import checksum, save_json
    from value_aware_attention.measurement.prompted import measure_prompts
    from value_aware_attention.measurement.store import RecordCache, source_hash
    from value_aware_attention.probe import loaded
    from value_aware_study.evaluation.pretrained import packaged_model, weights_of
    from value_aware_study.paths import inside

    name = f"{cfg.model.name}-{cfg.text_name}-{cfg.kind}-{cfg.length}"
    file = inside(cfg.records, name, ".json")
    settings = {key: partial(after, plain(value)) for key, value in cfg.settings.items()}
    model, tokenizer = loaded(packaged_model(cfg.model, cfg.cache))
    code = source_hash("value_aware_attention.measurement.prompted")
    store = RecordCache(cfg.cache, {"weights": checksum(weights_of(cfg.model)), "code": code})
    with tracked(cfg, "caches", cfg.text_name):
        record = measure_prompts(
            model, list(prompts(cfg, tokenizer)), settings, keep=cfg.keep, store=store,
            name=cfg.model.model, task=cfg.kind,
            description=cfg.description or cfg.model.description,
        )  # fmt: skip
        save_json(file, record.to_json())
    print(file)


def after(setting: dict[str, Any], r: int, prefix: int) -> "AfterPrefix":
    """Builds a setting with r keys of a prompt."""
    from value_aware_attention.decoding.after_prefix import AfterPrefix
    from value_aware_study.cards import cache_cards

    options = dict(setting)
    method = cache_cards()[options.pop("card")].method(r)
    return AfterPrefix(method, prefix=prefix, **options)


def prompts(cfg: DictConfig, tokenizer: "PreTrainedTokenizerBase") -> Iterator["Prompt"]:
    """Yields the prompts of a kind, each from a text of its own where there are enough."""
    from value_aware_study.evaluation import prompts as kinds

    sources = [documents(cfg.text)] if cfg.text else map(instantiate, cfg.model.texts.values())
    texts = [document.text for source in sources for document in source]
    if cfg.kind == "running_text":
        yield from islice(
            kinds.running_text(tokenizer, texts, cfg.length, cfg.continuation), cfg.prompts
        )
    else:
        build = {"needles": kinds.needles, "recalled_list": kinds.recalled_list}[cfg.kind]
        for number, text in zip(range(cfg.prompts), cycle(texts), strict=False):
            yield build(tokenizer, text, cfg.length, cfg.seed + number)


if __name__ == "__main__":
    main()
