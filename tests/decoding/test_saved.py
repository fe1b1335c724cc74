"""A compressed context that was saved and loaded is, to the bit, the one that was never saved."""

import json
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.decoding.test_compressed_cache import (
    BUDGETS,
    EVEN,
    KEEP,
    KINDS,
    LATER,
    METHODS,
    NEW,
    PREFIX,
    Uneven,
    decoder,
    part,
    placed,
    read,
    text,
    through,
)
from tests.hugging_face.models import sharp
from tests.refusals import assert_refused
from value_aware_attention.caches import CacheMethod, LeaveOneOut, Recent
from value_aware_attention.decoding import pages, saved
from value_aware_attention.decoding.kept_layer import KeptLayer
from value_aware_attention.files import DiskFull, with_checksum
from value_aware_attention.hugging_face import compressed_cache, load_compressed, save_compressed

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("error:no token was read over:UserWarning"),
]
WAYS: dict[str, tuple[Callable[[int], CacheMethod], dict[str, Any]]] = {
    "single": (LeaveOneOut, {}),
    "int8": (Uneven, {"bits": 8}),
    "mean slot": (Uneven, {"mean_slot": True}),
    "uneven": (Uneven, {}),
    **{f"{name}, {budget}": (METHODS[name], BUDGETS[budget]) for name, budget in (
        ("scores", "even"), ("joint", "default"), ("refitted", "even"), ("refitted", "layer"),
    )},
}  # fmt: skip
CASES = [*product((*KINDS, "cohere2"), ("float32", "bfloat16"), (0, 4), WAYS)]
QUICK = {
    *product(
        ("llama", "cohere2"),
        ("float32", "bfloat16"),
        (4,),
        ("uneven", "int8", "mean slot", "scores, even"),
    ),
    *product(("gpt2",), ("float32",), (0, 4), ("refitted, even", "refitted, layer")),
}
CUTS = [PREFIX + 1, PREFIX + 2]
"""Later tokens are read one by one, then several at once"""


@contextmanager
def written(
    model: PreTrainedModel, method: Any, inputs: dict[str, Tensor], file: Path, **options: Any
) -> Iterator[Any]:
    """Reads a prompt, saves its compressed cache, and yields it in its open context."""
    with compressed_cache(model, method, **{"keep": KEEP} | options), torch.no_grad():
        cache = model(**part(placed(model, inputs), 0, PREFIX), use_cache=True).past_key_values
        save_compressed(cache, file)
        yield cache


@torch.no_grad()
def answers(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any) -> Tensor:
    """Computes the logits of the later tokens over a cache of the prompt."""
    inputs, logits = placed(model, inputs), []
    for first, last in zip([PREFIX, *CUTS], [*CUTS, PREFIX + LATER], strict=True):
        output = model(**part(inputs, first, last), past_key_values=cache, use_cache=True)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    ("kind", "dtype", "padding", "way"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_questions_after_loading_get_the_logits_of_a_context_that_was_never_saved(
    kind: str, dtype: str, padding: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over copies, with equal weights in another model, and without the prompt."""
    monkeypatch.setattr(pages, "PAGES", 2)  # large pages, some of whose slots are unused
    models = [decoder(kind).to(getattr(torch, dtype)) for _ in range(2)]
    models = [model if kind == "cohere2" else set_sdpa(model) for model in models]
    (method, options), inputs, file = WAYS[way], text(padding=padding), tmp_path / "context"
    expected, _, _ = through(models[0], method, inputs, [PREFIX, *CUTS], **options)
    with written(models[0], method, inputs, file, **options):
        pass
    with load_compressed(file, models[1]) as cache:
        assert torch.equal(cache.attention_mask, inputs["attention_mask"][:, :PREFIX])
        for loaded in (deepcopy(cache), cache):
            assert torch.equal(answers(models[1], inputs, loaded), expected)
    counts = [layer.counts for layer in cache.layers if isinstance(layer, KeptLayer)]
    assert counts and all((count < PREFIX).all() for count in counts)


def set_sdpa(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("options", BUDGETS.values(), ids=BUDGETS)
def test_a_context_is_saved_after_later_tokens_and_gives_the_same_bytes(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Twice, of a copy, and again after it was loaded."""
    model, inputs = sharp("llama"), text()
    files = [tmp_path / name for name in "abcd"]
    expected, _, _ = through(model, Uneven, inputs, [PREFIX, *CUTS], **options)
    with written(model, Uneven, inputs, files[0], **options) as cache:
        output = model(**part(placed(model, inputs), PREFIX, CUTS[0]), past_key_values=cache)
        assert torch.equal(output.logits, expected[:, :1])
        save_compressed(cache, files[1])
        save_compressed(deepcopy(cache), files[2])
    with load_compressed(files[1], model) as loaded, torch.no_grad():
        save_compressed(loaded, files[3])
        assert loaded.attention_mask.shape == (3, CUTS[0])
        rest = [
            model(**part(placed(model, inputs), *bounds), past_key_values=loaded).logits
            for bounds in (CUTS, (CUTS[1], PREFIX + LATER))
        ]
        assert torch.equal(torch.cat(rest, dim=1), expected[:, 1:])
        assert "Uneven, keep=0.333" in loaded.asked and "observed='" in loaded.asked
    first, *others = (file.read_bytes() for file in files)
    assert first != others[0] and others[0] == others[1] == others[2]


def test_a_file_holds_the_positions_and_names_no_code(tmp_path: Path) -> None:
    model, file = sharp("llama"), tmp_path / "context"
    with written(model, Recent, text(), file, **EVEN):
        pass
    indices = load_file(file)["0.indices"]
    assert indices[1, 0].tolist() == [0, 1, *range(PREFIX - 6, PREFIX)]  # of 24 tokens
    assert indices[0, 0].tolist() == [-1, 0, 1, *range(PREFIX - 4 - 5, PREFIX - 4)]  # of 20
    with safe_open(file, "pt") as opened:
        (text_of_header,) = opened.metadata().values()
    header = json.loads(text_of_header)
    assert set(header) == {"format", "asked", "model", "layers", "sha256", "content_sha256"}
    assert header["model"]["rms_norm_eps"] == model.config.rms_norm_eps


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("saved") / "context"
    with written(sharp("llama"), Recent, text(), file):
        return file


def finetuned() -> PreTrainedModel:
    model = sharp("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
    return model


def with_other_epsilon() -> PreTrainedModel:
    config = sharp("llama").config
    config.rms_norm_eps = 0.5
    model = type(sharp("llama"))(config).eval()
    model.load_state_dict(sharp("llama").state_dict())
    return model


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (finetuned, "its sha256 of the weights is '.{64}', this model's is '.{64}'$"),
        (lambda: sharp("llama").bfloat16(), "dtype is 'torch.float32', this .* 'torch.bfloat16'"),
        (with_other_epsilon, "its rms_norm_eps is .*, this model's is 0.5$"),
        (lambda: sharp("qwen2"), "its model_type is 'llama', this model's is 'qwen2'|its "),
        (lambda: sharp("bert"), "not a decoder"),
    ],
)
def test_another_model_is_refused(context: Path, build: Callable[[], Any], line: str) -> None:
    model = build()
    assert_refused(line, load_compressed(context, model).__enter__)
    assert model.config._attn_implementation == "eager"


def test_weights_that_changed_since_are_noticed(context: Path) -> None:
    """Their hash is computed once, until they change."""
    model = sharp("llama")
    with load_compressed(context, model):
        pass
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight += 1
    assert_refused("sha256 of the weights", load_compressed(context, model).__enter__)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


def change_header(file: Path) -> None:
    """Makes the header say that another text has been seen."""
    content = file.read_bytes()
    assert content.count(b'\\"prefix\\": 24') == 4
    file.write_bytes(content.replace(b'\\"prefix\\": 24', b'\\"prefix\\": 23'))


def newer(file: Path) -> None:
    header = with_checksum(json.dumps({"format": saved.FORMAT + 1}))
    save_file(load_file(file), file, {saved.HEADER: header})


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (cut, "context is damaged .*: save the context again"),
        (flip, r"context is damaged \(it has changed since it was written\): save the"),
        (change_header, r"context is damaged \(it has changed since it was written\): save the"),
        (lambda file: file.write_text("a text"), "context is damaged .*: save the context again"),
        (lambda file: file.write_bytes(b""), "context is damaged .*: save the context again"),
        (lambda file: save_file({"a": torch.ones(2)}, file), "is no compressed context that"),
        (newer, "has the format 3; this version reads up to 2: install a newer value-aware"),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_refused(
    context: Path, damage: Callable[[Path], object], line: str, tmp_path: Path
) -> None:
    file = tmp_path / "context"
    file.write_bytes(context.read_bytes())
    damage(file)
    assert_refused(line, load_compressed(file, sharp("llama")).__enter__)
    file.unlink()
    missing = load_compressed(file, sharp("llama")).__enter__
    assert_refused("No such file", missing, error=FileNotFoundError)


def test_caches_that_cannot_be_saved_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    model, file = sharp("llama"), tmp_path / "context"
    line = "is a DynamicCache; it must have layers that were compressed within compressed_cache"
    assert_refused(line, save_compressed, DynamicCache(), file)
    assert_refused("cache is a NoneType; it must have layers", save_compressed, None, file)
    with compressed_cache(model, Recent, keep=KEEP, **EVEN, every=2):
        cache = read(model, text(), [PREFIX])[1]
        line = "layer 0 is a GrowingLayer; .*, since with `every` later choices need the method"
        assert_refused(line, save_compressed, cache, file)
    with compressed_cache(model, Recent, keep=KEEP):
        cache = read(model, text(), [PREFIX])[1]
        cache.layers[2].crop(-1)
        assert_refused(
            "all its layers must have read the same tokens", save_compressed, cache, file
        )
        cache.layers[2] = DynamicCache(config=model.config).layers[2]
        cache.layers[2].update(torch.ones(3, 2, PREFIX + LATER, 8), torch.ones(3, 2, 30, 8))
        assert_refused("layer 2 is a DynamicLayer; compressed layers", save_compressed, cache, file)
        cache.reset()
        assert_refused("it must have layers that were compressed", save_compressed, cache, file)
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_leaves_the_old_file(context: Path, tmp_path: Path) -> None:
    file, model = tmp_path / "context", sharp("llama")
    file.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with load_compressed(context, model) as cache:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            assert_refused("bytes are free", save_compressed, cache, file, error=DiskFull)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == [file] and file.read_text() == "before"


@pytest.mark.parametrize("kind", ["llama", "cohere2"])
def test_a_batch_of_questions_reads_one_context(kind: str, tmp_path: Path) -> None:
    """A copy is repeated; a batch that does not fit is refused before a layer reads it."""
    model, file = sharp(kind), tmp_path / "context"
    inputs = {name: x[1:2] for name, x in text().items()}
    with written(model, Uneven, inputs, file):
        pass
    questions = torch.randint(5, 90, (5, 4), generator=torch.Generator().manual_seed(3))
    with load_compressed(file, model) as cache, torch.no_grad():
        single = [
            model(question, past_key_values=deepcopy(cache)).logits
            for question in questions.split(1)
        ]
        line = r"the cache holds 1 texts and the call brings 5; cache.batch_repeat_interleave\(n\)"
        assert_refused(line, model, questions, past_key_values=cache)
        batch = deepcopy(cache)
        batch.batch_repeat_interleave(5)
        torch.testing.assert_close(
            model(questions, past_key_values=batch).logits, torch.cat(single), rtol=1e-4, atol=1e-4
        )
        mask = torch.cat([cache.attention_mask, torch.ones_like(questions[:1])], dim=1)
        generated = model.generate(
            questions[:1], attention_mask=mask, past_key_values=deepcopy(cache), **NEW,
            do_sample=False,
        )  # fmt: skip
        assert generated[0, 4] == single[0][0, -1].argmax() and generated.shape == (1, 4 + LATER)


def test_a_loaded_context_is_read_alone_and_while_it_is_open(context: Path) -> None:
    model, token = sharp("llama"), torch.full((3, 1), 7)
    with load_compressed(context, model) as cache, torch.no_grad():
        line = "within load_compressed a model reads the loaded cache alone; give it as past_key"
        for options in ({}, {"past_key_values": DynamicCache(config=model.config)}):
            assert_refused(line, model, token, **options)
        line = "it cannot be pickled; hugging_face.save_compressed writes it"
        assert_refused(line, pickle.dumps, cache)
        assert_refused("replaced already", load_compressed(context, model).__enter__)
        model(token, past_key_values=cache)
    line = "a compressed_cache or load_compressed that is closed"
    with torch.no_grad():
        assert_refused(line, model, token, past_key_values=cache)
