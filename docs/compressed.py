"""Tries `compressed_cache` on every causal architecture of the installed transformers.

python -m docs.compressed    # prints the tables of docs/decoding.md
"""

import re
from collections import defaultdict
from collections.abc import Callable
from inspect import signature
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.models.auto import modeling_auto

from docs.architectures import NO_INTERFACE, NOT_TRIED, architectures, calls_interface, quiet, tiny
from value_aware_attention import caches
from value_aware_attention.hugging_face import compressed_cache, replace_attention

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
PREFIX, TOKENS, KEEP = 24, 30, 1 / 3
R = round(KEEP * PREFIX)
SHOWN = ("llama", "qwen3", "mistral", "gemma", "phi", "gpt2")
"""Architectures of the table of differences"""
EVEN: dict[str, Any] = {"observed": "noncausal", "pool": None}
METHODS: dict[str, tuple[Callable[[int], caches.CacheMethod], dict[str, Any]]] = {
    "scores": (caches.ObservedAttention, {"observed": "last", "pool": None}),
    "joint, one budget": (caches.ValueAware, {"observed": "continued", "pool": "model"}),
    "refitted": (lambda r: caches.ValueAware(r, refit=True), EVEN),
    "every 2": (caches.ValueAware, {"observed": "last", "pool": None, "every": 2}),
}
FORMS = {"one text": 0, "left padding": 6}
"""Tokens of padding before the first text"""


class Result(NamedTuple):
    """Holds how far decoding with a compressed cache is from its reference, or who refused."""

    difference: float = nan
    """Largest difference of a logit, in parts of the largest logit"""
    dropped: float = nan
    """The difference that dropping keys makes, which shows that the test can fail"""
    layers: str = ""
    """The layers of the cache that stay as they are, by their kind"""
    refused: str = ""


def text(padding: int) -> dict[str, Tensor]:
    """Draws two texts, or one without padding, of which the first is padded on the left."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 90, (2 if padding else 1, TOKENS), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def placed(model: PreTrainedModel, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds the positions that `generate` gives."""
    if "position_ids" not in signature(model.forward).parameters:
        return given
    return given | {"position_ids": (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)}


@torch.no_grad()
def decoded(model: PreTrainedModel, given: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """Reads a prompt, two tokens one at a time and the others together; returns later logits."""
    given, cache, found = placed(model, given), DynamicCache(config=model.config), []
    for first, last in ((0, PREFIX), (PREFIX, PREFIX + 1), (PREFIX + 1, PREFIX + 2), (26, TOKENS)):
        part = {
            name: x[:, :last] if name == "attention_mask" else x[:, first:last]
            for name, x in given.items()
        }
        found.append(model(**part, past_key_values=cache, use_cache=True).logits)
    return torch.cat(found[1:], dim=1), cache


@torch.no_grad()
def one_pass(
    model: PreTrainedModel, given: dict[str, Tensor], method: Any, options: dict[str, Any]
) -> Tensor:
    """Computes the same logits in one pass of `AfterPrefix` over each text without its padding."""
    options = {"observed": "continued", "pool": "model"} | options  # as in compressed_cache
    logits = []
    for tokens, is_text in zip(given["input_ids"], given["attention_mask"].bool(), strict=True):
        prefix = int(is_text[:PREFIX].sum())
        after = caches.AfterPrefix(method(round(KEEP * prefix)), prefix=prefix, **options)
        with replace_attention(model, after):
            output = model(input_ids=tokens[is_text][None], use_cache=False)
        logits.append(output.logits[:, prefix:])
    return torch.cat(logits)


def difference(
    model: PreTrainedModel, method: Any, options: dict[str, Any], padding: int
) -> tuple[float, float, Any]:
    """Compares decoding with one pass; returns how far, how far all keys are, and the cache."""
    given = text(padding)
    expected = one_pass(model, given, method, options)
    with compressed_cache(model, method, keep=KEEP, **options):
        found, cache = decoded(model, given)
    size = expected.abs().max().clamp_min(1)
    exact = decoded(model, given)[0]
    return float((found - expected).abs().max() / size), float((exact - found).abs().max()), cache


def try_architecture(kind: str) -> Result:
    """Compares a tiny model of this type with one pass; a hybrid one, keeping all, with itself.

    Heads keep as many keys, and then what the defaults leave them.
    """
    if not calls_interface(kind):
        return Result(refused=NO_INTERFACE)
    with quiet():
        model, given = tiny(kind), text(0)
        with torch.no_grad():
            cache = getattr(model(**given, use_cache=True), "past_key_values", None)
        if cache is None:
            return Result(refused="it fills no cache")
        others = sorted({type(x).__name__ for x in cache.layers} - {"DynamicLayer"})
        method, even = METHODS["scores"]
        try:
            if not others:
                far = [difference(model, method, options, 0) for options in (even, {})]
                return Result(max(x[0] for x in far), min(x[1] for x in far))
            exact = decoded(model, given)[0]
            with compressed_cache(model, method, keep=KEEP) as report:
                dropped = decoded(model, given)[0]
            with compressed_cache(model, method, keep=1.0):
                found = decoded(model, given)[0]
        except ValueError as error:
            line = str(error).replace(type(model).__name__, "it").partition(":")[0]
            line = re.sub(r"^\w+ (attends to|uses) ", r"\1 ", line).partition(" and is not ")[0]
            return Result(refused=line.partition("; compressed_cache")[0])
        size = exact.abs().max().clamp_min(1)
        far = float((dropped - exact).abs().max() / size) if report.caches else nan
        return Result(float((found - exact).abs().max() / size), far, ", ".join(others))


def causal() -> list[str]:
    """Lists the causal architectures that are tried."""
    named = [kind for kind in architectures() if kind in CAUSAL and kind not in NOT_TRIED]
    return [kind for kind in named if architectures()[kind] == CAUSAL[kind]]


def verdicts() -> str:
    """Returns the table of all architectures in Markdown."""
    rows: dict[str, list[str]] = defaultdict(list)
    for kind in causal():
        rows[verdict(try_architecture(kind))].append(kind)
    lines = ["| | architectures |", "| --- | --- |"]
    return "\n".join(lines + [f"| {what} | {', '.join(rows[what])} |" for what in sorted(rows)])


def verdict(result: Result) -> str:
    """Says in the table's words what came out; AssertionError where logits are others."""
    if result.refused:
        return f"refused: {result.refused}"
    if not result.difference <= 1e-3:
        raise AssertionError(f"decoding departs: {result}")
    if not result.layers:
        return "equal to one pass"
    compressed = "nothing to compress" if result.dropped != result.dropped else "hybrid"
    return f"{compressed}; as they are: {result.layers}"


def full(kind: str) -> PreTrainedModel:
    """Builds a tiny model of full attention: Mistral's has a sliding window by default."""
    model = tiny(kind)
    if kind != "mistral":
        return model
    model.config.sliding_window = None
    return type(model)(model.config).eval()


def differences() -> str:
    """Returns the table of the largest differences in Markdown."""
    columns = [(a, form) for a in ("sdpa", "eager") for form in FORMS]
    head = ["| |", *(f" {attention}, {form} |" for attention, form in columns)]
    lines = ["".join(head), "| --- |" + " ---: |" * len(columns)]
    for kind in SHOWN:
        model = full(kind)
        for name, (method, options) in METHODS.items():
            cells = []
            for attention, form in columns:
                model.set_attn_implementation(attention)
                far = difference(model, method, options, FORMS[form])[0]
                cells.append(f" {far:.0e} |")
            lines.append(f"| {kind}, {name} |" + "".join(cells))
    return "\n".join(lines)


def chosen(model: PreTrainedModel, method: Callable[[int], caches.CacheMethod]) -> Tensor:
    """Returns the keys that a method keeps of the prompt, (layers, texts, key-value heads, r)."""
    found: list[Tensor] = []

    def noting(r: int) -> caches.CacheMethod:
        own = method(r)
        keep = own.keep

        def noted(seen: caches.Observed) -> caches.KeptKeys:
            found.append((kept := keep(seen)).indices)
            return kept

        own.keep = noted  # type: ignore[method-assign]
        return own

    with compressed_cache(model, noting, keep=KEEP, **EVEN):
        decoded(model, text(0))
    return torch.stack(found)


def choices_in_bf16() -> str:
    """Returns the table of the keys that are kept in bf16 and in fp32 alike in Markdown."""
    methods = {name: METHODS[name][0] for name in ("scores", "joint, one budget")}
    lines = ["| kept in bf16 and in fp32 | scores | joint |", "| --- | ---: | ---: |"]
    for kind in SHOWN:
        single, half = full(kind), full(kind)
        half.load_state_dict(single.state_dict())
        half.to(torch.bfloat16)
        shares = []
        for method in methods.values():
            a, b = chosen(single, method), chosen(half, method)
            shares.append((a[..., None] == b[..., None, :]).any(dim=-1).float().mean())
        lines.append(f"| {kind} |" + "".join(f" {share:.1%} |" for share in shares))
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{differences()}\n\n{choices_in_bf16()}\n\n{verdicts()}")
