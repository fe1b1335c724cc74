"""Every corpus option reads tiny copies of the hub's layout, composed as in the pipeline."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import datasets
import httpx
import numpy as np
import pytest
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules.json.json import Json
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from tests.refusals import assert_refused
from value_aware_attention.hugging_face.saved import hub_answers
from value_aware_study.data.corpora import write_corpus
from value_aware_study.data.text import HubDocuments
from value_aware_study.data.tokenization import ByteLevelBPE
from value_aware_study.data.tokens import token_stream, write_stream

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"


def corpus_option(name, **values):
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        return compose(
            overrides=[
                f"+corpus={name}",
                "+paths.cache=.",
                *(f"{k}={v}" for k, v in values.items()),
            ]
        ).corpus


def at_fixture(option, name):
    return instantiate(option.sources[name].documents, path=str(FIXTURES / name), cache=None)


@pytest.fixture(scope="module", autouse=True)
def without_network(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield
    patch.undo()


@pytest.mark.parametrize(
    ("name", "documents"),
    [
        ("wikitext103", (6, 2)),
        ("arxiv", (8, 3)),
        ("pg19", (6, 2)),
        *((name, None) for name in ("wikipedia", "bookcorpus", "pubmed")),
    ],
)
def test_from_the_hubs_layout_to_tokens_in_published_splits(name, documents, tmp_path):
    source = at_fixture(corpus_option(name), name)
    counts = write_corpus({name: source}, tmp_path / "corpus", 0, 0.2)[name]
    assert documents in (None, tuple(counts[s]["documents"] for s in ("train", "evaluation")))
    texts = [document.text for document in source]
    tokenizer = ByteLevelBPE(vocabulary_size=280, training_characters=10**6).build(texts)
    file = tmp_path / "corpus" / name / "evaluation.jsonl"
    stream = token_stream(file, tokenizer, seed=0, cache_dir=tmp_path / "cache")
    write_stream([stream], tmp_path / "tokens.npy", vocabulary_size=280)
    ends = (np.load(tmp_path / "tokens.npy") == tokenizer.eos_token_id).sum()
    assert ends == counts["evaluation"]["documents"] > 0


def test_rows_of_wikitext_become_articles_with_every_line():
    texts = [document.text for document in at_fixture(corpus_option("wikitext103"), "wikitext103")]
    assert len(texts) == 9  # of the train, validation and test splits
    assert all(text.lstrip("\n").startswith(" = Title") for text in texts)
    assert all("\n = = Section" in text and "\n\n = 3 = \n" in text for text in texts)
    assert any("<unk>" in text for text in texts)


def test_the_papers_mixture_is_table_3():
    sources = corpus_option("paper").sources
    train = {name: source.train_instances for name, source in sources.items()}
    millions = {"wikipedia": 3, "bookcorpus": 2, "arxiv": 3, "pubmed": 1, "pg19": 1}
    assert train == {"wikitext103": None} | {n: m * 10**6 for n, m in millions.items()}
    assert {sources[name].evaluation_instances for name in millions} == {2000}
    assert list(corpus_option("paper_mixture").sources) == list(millions)


def hub(**options):
    fixture = {"path": str(FIXTURES / "pg19"), "name": None, "splits": {"train": None}}
    return HubDocuments(**(fixture | {"field": "text"} | options))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"field": "body"}, ValueError, "no texts in 'body', only short_book_title, publication"),
        ({"field": "publication_date"}, ValueError, "no texts in 'publication_date'"),
        ({"splits": {"dev": None}}, ValueError, "split 'dev' cannot be loaded"),
        ({"name": "large"}, ValueError, "name 'large', split 'train' cannot be loaded"),
        ({"path": "nobody/nothing"}, FileNotFoundError, "neither a folder here nor reachable"),
    ],
)
def test_errors_are_one_line_and_name_the_data_set(options, error, message):
    assert_refused(message, list, hub(**options), error=error)


def test_a_data_set_with_a_loading_script_is_refused_in_one_line(tmp_path):
    (tmp_path / f"{tmp_path.name}.py").write_text("raise SystemExit('ran')")
    assert_refused("scripts are no longer supported", list, hub(path=str(tmp_path)))


def far(cache, **options):
    return hub(**{"path": "some/books", "cache": cache} | options)


def read(source):
    return [document.text for document in source]


def test_a_data_set_that_was_loaded_once_is_read_without_the_hub(tmp_path, monkeypatch):
    """The cache is laid out as `load_dataset` leaves it, from the files of a fixture."""
    files = {"train": [str(FIXTURES / "pg19/data/train.jsonl")]}
    builder = Json(cache_dir=str(tmp_path), dataset_name="books", data_files=files, hash="0" * 40)
    builder.download_and_prepare()
    shutil.copytree(builder.cache_dir, tmp_path / "some___books/default/0.0.0" / ("0" * 40))
    monkeypatch.setattr("value_aware_attention.hugging_face.saved.hub_answers", lambda: False)
    assert read(far(tmp_path)) == read(hub())
    assert_refused("split 'test' cannot be loaded", read, far(tmp_path, splits={"test": None}))


@pytest.mark.parametrize("error", [httpx.ReadError("gone\nmore"), DatasetGenerationError()])
def test_a_lost_connection_is_one_line_and_the_next_iteration_goes_on(tmp_path, monkeypatch, error):
    load, source = datasets.load_dataset, far(tmp_path, path=str(FIXTURES / "pg19"))
    line = rf"pg19', name None, split 'train', stopped.*{type(error).__name__}.*files that are mis"
    with monkeypatch.context() as patch:
        patch.setattr("datasets.load_dataset", Mock(side_effect=error))
        assert_refused(line, read, source, error=ConnectionError)
    assert datasets.load_dataset is load and read(source) == read(hub())


def test_a_hub_that_does_not_answer_is_known_in_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # discard port
    assert not hub_answers()
    assert_refused("the hub does not answer", read, far(tmp_path), error=FileNotFoundError)
