"""Every corpus option, composed as the pipeline does, read from tiny copies of the hub's layout."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import IterableDataset
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.test_apps import run_app
from value_aware_attention.hugging_face.hub import hub_answers
from value_aware_study.data.corpora import (
    Document,
    HubArticles,
    HubDocuments,
    read_texts,
    write_corpus,
)
from value_aware_study.data.packing import token_stream, write_instances, write_stream
from value_aware_study.data.tokenization import ByteLevelBPE

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
HUB = ["wikitext103", "wikipedia", "bookcorpus", "arxiv", "pubmed", "pg19"]


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
    assert len(texts) == 9  # of the train, validation and test splits
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


SHARDS = [[f"{shard}{row} é\n" for row in range(5)] for shard in "abc"]
ROWS = [text for shard in SHARDS for text in shard]


class Connection:
    """The hub as `datasets` streams it: three shards; the connection is lost before some rows."""

    def __init__(self, lost_before, error):
        self.lost_before, self.error = list(lost_before), error
        self.opened = []
        self.numbers = set()  # rows whose text is none

    def rows(self, shards):
        for shard in shards:
            self.opened.append(shard)
            for text in SHARDS[shard]:
                if text in self.lost_before:
                    self.lost_before.remove(text)
                    raise self.error
                yield {"text": 0 if text in self.numbers else text}

    def load_dataset(self, path, name, split, streaming):
        return IterableDataset.from_generator(self.rows, gen_kwargs={"shards": [0, 1, 2]})


@pytest.fixture
def connect(monkeypatch):
    def patched(*lost_before, error=None):
        connection = Connection(lost_before, error or ConnectionError("Server Disconnected"))
        monkeypatch.setattr("datasets.load_dataset", connection.load_dataset)
        monkeypatch.setattr("value_aware_attention.hugging_face.hub.hub_answers", lambda: True)
        return connection

    return patched


def far(cache, source=HubDocuments, **options):
    options = {"name": None, "splits": {"train": None}, "field": "text", "cache": cache} | options
    return source(path="some/books", **options)


def read(source):
    return [document.text for document in source]


class TestLostConnection:
    @pytest.mark.parametrize(
        "error", [ConnectionError("gone\nmore"), TimeoutError(), RuntimeError("Session is closed")]
    )
    @pytest.mark.parametrize("lost", [0, 1, 5, 7, 14])
    def test_one_line_and_the_next_iteration_continues(self, tmp_path, connect, lost, error):
        connection = connect(ROWS[lost], error=error)
        with pytest.raises(ConnectionError) as caught:
            read(far(tmp_path))
        message = str(caught.value)
        assert f"'some/books', split 'train', stopped after {lost} rows" in message
        assert str(tmp_path) in message and type(error).__name__ in message
        assert message.endswith("the same command continues there") and "\n" not in message
        connection.opened.clear()
        assert read(far(tmp_path)) == ROWS
        assert connection.opened == list(range(lost // 5, 3))  # whole shards are not read again

    def test_it_may_be_lost_again_and_again(self, tmp_path, connect):
        connect(*ROWS[::2])
        for _ in ROWS[::2]:
            with pytest.raises(ConnectionError):
                read(far(tmp_path))
        assert read(far(tmp_path)) == ROWS

    def test_what_is_complete_is_read_without_the_hub(self, tmp_path, connect):
        connection = connect()
        assert read(far(tmp_path)) == read(far(tmp_path)) == ROWS
        assert connection.opened == [0, 1, 2]
        assert read(far(tmp_path, splits={"train": None, "test": None})) == ROWS * 2
        assert connection.opened == [0, 1, 2] * 2  # another split is another thing to read
        read(far(tmp_path, name="other"))
        with pytest.raises(ValueError, match="no texts in 'body'"):
            read(far(tmp_path, field="body"))

    def test_a_kill_while_rows_are_written(self, tmp_path, connect, monkeypatch):
        connect(ROWS[7])
        with pytest.raises(ConnectionError):
            read(far(tmp_path))
        (file,) = tmp_path.glob("*/rows.jsonl")
        whole = file.read_bytes()
        for left in (whole + b'"b2 ', whole + whole, whole[:-3]):
            connection = connect()
            position = file.with_name("position.json").read_bytes()
            file.write_bytes(left)
            assert read(far(tmp_path)) == ROWS
            assert connection.opened[0] == (0 if len(left) < len(whole) else 1)
            file.with_name("position.json").write_bytes(position)

    def test_a_row_that_is_refused_is_refused_again(self, tmp_path, connect):
        connect().numbers.add(ROWS[3])
        for _ in range(2):
            with pytest.raises(ValueError, match="no texts in 'text'"):
                read(far(tmp_path))

    def test_positions_are_written_on_the_way(self, tmp_path, connect, monkeypatch):
        monkeypatch.setattr("value_aware_study.data.hub.BYTES_BETWEEN_POSITIONS", 20)
        connect()
        reading = iter(far(tmp_path))
        for _ in range(8):
            next(reading)
        (file,) = tmp_path.glob("*/position.json")
        position = json.loads(file.read_text())
        assert 5 < position["rows"] <= 8 and position["bytes"] > 40
        del reading

    def test_a_reader_that_stops_leaves_a_position(self, tmp_path):
        for name, source in (("wikitext103", HubArticles), ("pg19", HubDocuments)):
            option = corpus_option(name).sources[name].documents
            here = {"path": str(FIXTURES / name), "cache": str(tmp_path)}
            reading = iter(instantiate(option, **here))
            begun = [next(reading).text for _ in range(3)]
            reading.close()
            texts = read(instantiate(option, **here))
            assert texts == read(instantiate(option, path=here["path"], cache=None))
            assert texts[:3] == begun and isinstance(instantiate(option), source)

    def test_sources_that_were_finished_are_not_loaded_again(self, tmp_path, connect):
        connection = connect(ROWS[9])
        book = Document("a book", "evaluation")
        first, second = far(tmp_path / "cache"), far(tmp_path / "cache", name="other")
        connection.lost_before = []
        read(first)
        connection.lost_before, connection.opened = [ROWS[9]], []
        sources = {"first": first, "second": second, "third": [book, Document("b", "train")]}
        with pytest.raises(ConnectionError):
            write_corpus(sources, tmp_path / "corpus", 0, 0.2)
        assert connection.opened == [0, 1]
        write_corpus(sources, tmp_path / "corpus", 0, 0.2)
        assert connection.opened == [0, 1, 1, 2]
        whole = {name: far(None, name=name) for name in ("first", "second")}
        write_corpus(whole, tmp_path / "whole", 0, 0.2)
        for name in whole:
            for split in ("train", "evaluation"):
                one, other = (tmp_path / f / name / f"{split}.jsonl" for f in ("corpus", "whole"))
                assert list(read_texts([one])) == list(read_texts([other]))

    @pytest.mark.filterwarnings("ignore")
    def test_the_stage_continues_when_it_is_repeated(self, tmp_path, connect):
        connection = connect(ROWS[9])
        with pytest.raises(SystemExit) as stop:
            run_app("corpus corpus=bookcorpus", tmp_path)
        message = str(stop.value)
        assert message.startswith("error: data set 'lucadiliello/bookcorpusopen'")
        assert "stopped after 9 rows" in message and "\n" not in message
        assert not (tmp_path / "outputs/smoke/corpus").exists()
        connection.opened.clear()
        run_app("corpus corpus=bookcorpus", tmp_path)
        assert connection.opened == [1, 2]
        folder = tmp_path / "outputs/smoke/corpus/bookcorpus"
        files = [folder / f"{split}.jsonl" for split in ("train", "evaluation")]
        assert sorted(read_texts(files)) == ROWS

    def test_without_a_cache_it_starts_again(self, connect):
        connect(ROWS[2])
        with pytest.raises(ConnectionError, match=r"after 2 rows \(.*; .* starts again$"):
            read(far(None))


def test_a_hub_that_does_not_answer_is_known_in_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # discard port
    assert not hub_answers()
    with pytest.raises(FileNotFoundError, match="the hub does not answer") as caught:
        read(far(tmp_path))
    assert "\n" not in str(caught.value)
