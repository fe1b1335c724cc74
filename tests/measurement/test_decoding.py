"""Decoding is measured as the model would decode: compared with one pass, and with a slow loop."""

import itertools
import json
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div

from tests.hugging_face.models import sharp
from tests.refusals import assert_refused
from value_aware_attention.caches import AfterPrefix, Recent, ValueAware
from value_aware_attention.decoding import compressed
from value_aware_attention.hugging_face import replace_attention
from value_aware_attention.measurement.cache_record import FULL, DecodingRecord
from value_aware_attention.measurement.decoding import measure_decoding
from value_aware_attention.measurement.task import Task, Text

PREFIX, LENGTH = 16, 24
CACHES: dict[str, dict[str, Any]] = {
    "recent": {"method": Recent},
    "one budget": {"method": ValueAware, "observed": "continued", "pool": "model"},
}


def text(seed: int) -> Text:
    tokens = torch.randint(5, 90, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return Text.of_tokens(tokens, seed)


@pytest.fixture(scope="module")
def task() -> Task:
    return Task(sharp("llama"), [text(0), text(1)], "perplexity")


@pytest.fixture(scope="module")
def record(task: Task) -> DecodingRecord:
    return measure_decoding(
        task, CACHES, keep=[0.5, 1.0], prefix=PREFIX, model_name="tiny", task_name="text",
        progress=False,
    )  # fmt: skip


def test_cells_are_those_of_one_pass(task: Task, record: DecodingRecord) -> None:
    tokens = torch.cat([text.inputs for text in task.texts])
    places = [(FULL, 1.0), ("recent", 0.5), ("one budget", 0.5), ("recent", 1.0)]
    cells = {(cell.cache, cell.keep): cell for cell in record.cells}
    assert list(cells)[:4] == places and len(cells) == 5
    with torch.no_grad():
        exact = task.model(tokens).logits[:, PREFIX:].log_softmax(-1)
        for name, keep in places[1:]:
            options = {"observed": "noncausal"} | CACHES[name]
            method = options.pop("method")(round(keep * PREFIX))
            with replace_attention(task.model, AfterPrefix(method, prefix=PREFIX, **options)):
                logs = task.model(tokens, use_cache=False).logits[:, PREFIX:].log_softmax(-1)
            far = kl_div(logs, exact, reduction="none", log_target=True).sum(-1).mean()
            cell = cells[name, keep]
            assert cell.kl.value == pytest.approx(far.item(), rel=1e-3, abs=1e-6)
            nats = -logs[:, :-1].gather(-1, tokens[:, PREFIX + 1 :, None]).mean().item()
            assert cell.nats.value == pytest.approx(nats, rel=1e-3)
    assert cells["recent", 0.5].kl.value > 0.01


def test_the_full_cache_decodes_what_generate_does(task: Task, record: DecodingRecord) -> None:
    full = record.cells[0]
    assert full.kl.value == 0 and full.same.value == 1 and full.time.value == 1
    right = []
    for row in task.texts:
        prompt = row.inputs[:, : PREFIX + 1]  # the first token after the prompt is the text's
        decoded = task.model.generate(
            prompt, max_new_tokens=LENGTH - PREFIX - 1, do_sample=False, pad_token_id=0,
            eos_token_id=None, attention_mask=torch.ones_like(prompt),
        )  # fmt: skip
        right.append((decoded == row.inputs)[:, PREFIX + 1 :].float().mean())
    assert full.right.value == pytest.approx(torch.stack(right).mean().item())


def test_bytes_are_those_that_are_held(record: DecodingRecord) -> None:
    for cell in record.cells[1:]:
        assert cell.full_bytes == record.cells[0].bytes
        even = cell.cache == "recent"
        assert cell.bytes / cell.full_bytes == pytest.approx(cell.keep, rel=0.1 if even else 0.6)
        assert cell.choosing_seconds > 0 and cell.milliseconds > 0
        assert torch.tensor(cell.keys).mean() == round(cell.keep * PREFIX)


def test_later_choices_are_timed_in_one_decoding(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on by a second whenever it is read, so that a choice takes one."""
    seconds = itertools.count()
    monkeypatch.setattr(compressed, "_time", lambda: float(next(seconds)))
    every = {"method": Recent, "observed": "last", "every": 2, "pool": None}
    _, cell = measure_decoding(
        task, {"again": every}, keep=[0.5], prefix=PREFIX, model_name="", task_name="",
        progress=False,
    ).cells  # fmt: skip
    layers, texts, later = 4, 2, (LENGTH - PREFIX) // 2
    assert cell.choosing_seconds == (1 + layers * later) / texts


def test_a_record_is_read_again(record: DecodingRecord) -> None:
    assert DecodingRecord.from_json(record.to_json()) == record
    content = json.loads(record.to_json())
    content["cells"] = content["cells"][1:]
    assert_refused(
        "first cell is not of the full cache", DecodingRecord.from_json, json.dumps(content)
    )


def test_what_cannot_be_decoded_is_refused(task: Task) -> None:
    def measured(task: Task, **changed: Any) -> None:
        arguments: dict[str, Any] = {"caches": CACHES, "keep": [0.5], "prefix": PREFIX}
        arguments |= {"model_name": "", "task_name": "", "progress": False} | changed
        measure_decoding(task, arguments.pop("caches"), **arguments)

    assert_refused(
        "prefix is 23; with 24 tokens it must be 1 to 22", measured, task, prefix=LENGTH - 1
    )
    config = sharp("mistral").config
    config.sliding_window = 8
    windowed = Task(type(sharp("mistral"))(config).eval(), [text(0)], "perplexity")
    assert_refused("there is nothing to compress", measured, windowed)
    assert_refused("caches or keep is empty", measured, task, keep=[])
    assert_refused(
        "metric is 'cosine'; only causal models decode",
        measured,
        Task(task.model, task.texts, "cosine"),
    )
