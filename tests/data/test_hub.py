"""Every corpus option, composed as the pipeline does, read from tiny copies of the hub's layout."""

from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from value_aware_attention.data.corpora import HubDocuments, write_corpus
from value_aware_attention.data.packing import token_stream, write_instances, write_stream
from value_aware_attention.data.tokenization import ByteLevelBPE

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
HUB = ["wikitext103", "wikipedia", "bookcorpus", "arxiv", "pubmed", "pg19"]


def corpus_option(name, **values):
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        return compose(
            overrides=[f"+corpus={name}", *(f"{k}={v}" for k, v in values.items())]
        ).corpus


def at_fixture(option, name):
    return instantiate(option.sources[name].documents, path=str(FIXTURES / name))


@pytest.fixture(scope="module", autouse=True)
def without_network(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield
    patch.undo()


@pytest.mark.parametrize("name", HUB)
def test_from_the_hubs_layout_to_tokens(name, tmp_path):
    source = at_fixture(corpus_option(name), name)
    counts = write_corpus({name: source}, tmp_path / "corpus", 0, 0.2)
    texts = [document.text for document in source]
    tokenizer = ByteLevelBPE(vocabulary_size=280, training_characters=10**6).build(texts)
    for split in ("train", "evaluation"):
        file = tmp_path / "corpus" / name / f"{split}.jsonl"
        stream = token_stream(file, tokenizer, seed=0, cache_dir=tmp_path / "cache")
        total = write_stream([stream], tmp_path / f"{split}.npy", vocabulary_size=280)
        ends = (np.load(tmp_path / f"{split}.npy") == tokenizer.eos_token_id).sum()
        assert ends == counts[name][split]["documents"] > 0
        path = tmp_path / f"{split}-instances.npy"
        rows = write_instances(stream, path, tokenizer=tokenizer, instance_length=32)
        assert rows == total // 30 > 0


@pytest.mark.parametrize(
    ("name", "documents"), [("wikitext103", (6, 2)), ("arxiv", (8, 3)), ("pg19", (6, 2))]
)
def test_published_splits_are_kept(name, documents, tmp_path):
    counts = write_corpus({name: at_fixture(corpus_option(name), name)}, tmp_path / "c", 0, 0.5)
    assert tuple(counts[name][s]["documents"] for s in ("train", "evaluation")) == documents


def test_rows_of_wikitext_become_articles_with_every_line():
    texts = [document.text for document in at_fixture(corpus_option("wikitext103"), "wikitext103")]
    assert len(texts) == 8
    assert all(text.lstrip("\n").startswith(" = Title") for text in texts)
    assert all("\n = = Section" in text and "\n\n = 3 = \n" in text for text in texts)
    assert any("<unk>" in text for text in texts)


def test_the_papers_mixture_is_table_3():
    sources = corpus_option("paper").sources
    train = {name: source.train_instances for name, source in sources.items()}
    millions = {"wikipedia": 3, "bookcorpus": 2, "arxiv": 3, "pubmed": 1, "pg19": 1}
    assert train == {"wikitext103": None} | {n: m * 10**6 for n, m in millions.items()}
    tokens = {name: 510 * train[name] for name in millions}
    assert (
        tokens["wikipedia"] == 1.53e9 and tokens["pg19"] == 510e6 and sum(tokens.values()) == 5.1e9
    )
    evaluation = {name: sources[name].evaluation_instances for name in millions}
    assert set(evaluation.values()) == {2000}
    assert list(corpus_option("paper_mixture").sources) == list(millions)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "conf/corpus").glob("*.yaml")), ids=lambda f: f.stem
)
def test_every_option_builds_its_sources(file, tmp_path):
    values = {"corpus.path": tmp_path} if file.stem == "local" else {}
    option = corpus_option(file.stem, **values)
    for source in option.sources.values():
        assert hasattr(instantiate(source.documents), "__iter__")
        assert set(source) == {"documents", "train_instances", "evaluation_instances"}


def test_local_text(tmp_path):
    (tmp_path / "a.txt").write_text("mine")
    option = corpus_option("local", **{"corpus.path": tmp_path})
    assert [d.text for d in instantiate(option.sources.local.documents)] == ["mine"]


@pytest.mark.parametrize("name", ["byte_level_bpe", "roberta", "word_level"])
def test_every_tokenizer_option_builds(name):
    option = OmegaConf.load(ROOT / f"conf/tokenizer/{name}.yaml")
    values = OmegaConf.create({"tokens": {"vocabulary_size": 300, "training_characters": 1000}})
    assert hasattr(instantiate(OmegaConf.merge(values, {"it": option}).it), "build")


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
    with pytest.raises(error, match=message) as caught:
        list(hub(**options))
    assert "\n" not in str(caught.value)


def test_a_data_set_with_a_loading_script_is_refused_in_one_line(tmp_path):
    (tmp_path / f"{tmp_path.name}.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match="scripts are no longer supported"):
        list(hub(path=str(tmp_path)))
