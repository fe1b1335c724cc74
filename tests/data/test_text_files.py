"""Documents of local files: their splits, and the line that counts what is left out."""

from value_aware_study.data.text import Document, TextFiles


def test_a_glob_and_an_evaluation_path(tmp_path):
    for name in ("train-1", "train-2", "test"):
        (tmp_path / f"{name}.txt").write_text(name)
    source = TextFiles(f"{tmp_path}/train-*.txt", evaluation_path=tmp_path / "test.txt")
    assert list(source) == [
        Document("train-1", "train"),
        Document("train-2", "train"),
        Document("test", "evaluation"),
    ]


def test_what_is_left_out_is_printed(tmp_path, capsys):
    for name in ("a.jsonl", "b.pdf"):
        (tmp_path / name).write_text('{"body": "x", "text": "y"}')
    assert list(TextFiles(tmp_path, field="body")) == [Document("x")]
    assert capsys.readouterr().out == f"{tmp_path}: text files read: 1; left out: .pdf (1)\n"
