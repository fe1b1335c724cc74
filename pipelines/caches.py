"""Stage caches: how compressed caches change a decoder's predictions, on prompts.

python -m pipelines.caches [model=PATH_OR_NAME] [text=FILE] [kind=needles|recalled_list] \\
    [length=512] [gaps=true] [decoding=true] ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from pipelines.app import app, file_hash, own_values, plain
from value_aware_study.data.text import HUB

if TYPE_CHECKING:  # they import torch
    from transformers import PreTrainedTokenizerBase

    from value_aware_attention.measurement.caches import Build, Prompt


@app(
    "caches",
    short=(
        *("model", "text", "text_name", "description", "kind", "length", "prompts", "group"),
        *("keep", "gaps", "decoding"),
    ),
)
def main(cfg: DictConfig) -> None:
    """Writes <records>/<model>-<group>-<kind>-<text>-<length>[-<own values>].json."""
    from pipelines.app.tracking import tracked
    from value_aware_attention.files import save_json
    from value_aware_attention.hugging_face.saved import short_name
    from value_aware_attention.measurement.caches import measure_prompts
    from value_aware_attention.measurement.store import RecordCache, source_hash
    from value_aware_attention.measurement.windows import adds_bos
    from value_aware_attention.models.checkpoints import checkpoint_files
    from value_aware_attention.probe import loaded
    from value_aware_attention.records.terminal import cache_table
    from value_aware_attention.texts import text_paths
    from value_aware_study.evaluation.pretrained import named_text, packaged_model, texts_of
    from value_aware_study.safe_text import inside

    if cfg.model and not cfg.text:
        raise ValueError(f"caches.model is {cfg.model}; give a text for it, caches.text=<file>")
    is_file = cfg.text and not cfg.text.startswith(HUB)
    sha256 = file_hash(text_paths(Path(cfg.text))) if is_file else ""
    text, description = named_text(cfg, sha256, cfg.pretrained.description)
    short = short_name(cfg.model) if cfg.model else cfg.pretrained.name
    name = f"{short}-{cfg.group}-{cfg.kind}-{text}-{cfg.length}{own_values(cfg, 'caches')}"
    file, caches = inside(cfg.records, name, ".json"), caches_of_group(cfg)
    folder = cfg.model or packaged_model(cfg.pretrained, cfg.cache)
    model, tokenizer = loaded(folder)
    code = source_hash("value_aware_attention.measurement.caches")
    store = RecordCache(cfg.cache, {"weights": file_hash(checkpoint_files(folder)), "code": code})
    with tracked(cfg, "caches", text):
        record = measure_prompts(
            model, prompts(cfg, tokenizer, texts_of(cfg.text, cfg.pretrained)), caches,
            keep=cfg.keep, store=store,
            name=short if cfg.model else cfg.pretrained.model, task=cfg.kind, text=text,
            description=description, gaps=cfg.gaps,
            decoded=cfg.continuation if cfg.decoding else 0,
        )  # fmt: skip
        record = replace(record, begins_with_bos=adds_bos(tokenizer))
        save_json(file, record.to_json())
    print(*cache_table(record), file, sep="\n")


def caches_of_group(cfg: DictConfig) -> "Mapping[str, Build]":
    """Returns a group's choices of keys; published methods come first if it includes them."""
    if cfg.group not in cfg.compared:
        raise ValueError(
            f"caches.group is {cfg.group}; it must be one of {', '.join(cfg.compared)}"
        )
    from value_aware_study.cache_cards import cache_cards

    cards, group = cache_cards(), plain(cfg.compared[cfg.group])
    published = [card for card in cards.values() if card.after is not None]
    peers = published if cfg.group == "practical" else []
    caches = {card.label: partial(card.after_prefix, card.after or {}) for card in peers}
    return caches | {
        name: partial(cards[options.pop("card")].after_prefix, options)
        for name, options in group.items()
    }


def prompts(
    cfg: DictConfig, tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]
) -> "list[Prompt]":
    """Builds the prompts of a kind, each from another passage; ValueError for too few."""
    from value_aware_study.evaluation import prompts as kinds

    build = {
        "running_text": kinds.running_text,
        "needles": kinds.needles,
        "recalled_list": kinds.recalled_list,
    }[cfg.kind]
    tokens, end = cfg.length + cfg.continuation, cfg.skip + cfg.prompts
    if len(passages := list(islice(kinds.passages(tokenizer, texts, tokens), end))) < end:
        raise ValueError(
            f"the text fills {len(passages)} prompts of {tokens} tokens; {cfg.prompts} after the "
            f"first {cfg.skip} are asked for: give a longer text, fewer of them (caches.prompts), "
            f"or skip fewer (caches.skip)"
        )
    return [
        build(tokenizer, passage, cfg.length, cfg.seed + number)
        for number, passage in enumerate(passages[cfg.skip :])
    ]


if __name__ == "__main__":
    main()
