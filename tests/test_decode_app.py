"""The app lets a model of the user decode a text with compressed caches."""

from pathlib import Path

import pytest

from tests.apps import refusal, run_app
from tests.hugging_face.models import sharp
from value_aware_attention.measurement.cache_record import FULL, DecodingRecord

pytestmark = pytest.mark.filterwarnings("ignore")


def read(file: Path) -> DecodingRecord:
    return DecodingRecord.from_json(file.read_text())


def test_a_model_of_the_user_decodes_a_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(90)} | {"[UNK]": 90}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    sharp("llama").save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(folder)
    text.write_text(" ".join(f"w{number % 90}" for number in range(0, 3000, 7)))
    options = "decode.length=32 decode.tokens=6 decode.windows=2 decode.parts=[2]"
    run_app(f"decode model={folder} text={text} {options} decode.name=mine", tmp_path)
    record = read(tmp_path / "outputs/smoke/decoded/mine.json")
    assert (record.prefix, record.length, record.units) == (26, 32, 2)
    caches = [FULL, "SnapKV", "single losses", "single losses, one budget"]
    assert [cell.cache for cell in record.cells][:4] == caches
    assert {cell.r for cell in record.cells[1:]} == {13}
    assert len({cell.kl.value for cell in record.cells}) == len(record.cells)
    for tokens in (1, 32):
        given = f"{options} decode.tokens={tokens}"
        line = refusal(f"decode model={folder} text={text} {given}", tmp_path)
        assert f"decode.tokens is {tokens} of 32 tokens (decode.length); it must be 2 to 31" in line
    line = refusal(f"decode model={folder} text={text} {options} decode.parts=[26]", tmp_path)
    assert "which leaves 1 of the prompt's 26 tokens" in line


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "give model=PATH_OR_NAME and text=FILE" in refusal("decode", tmp_path)
