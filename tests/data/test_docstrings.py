import importlib
import inspect
import textwrap

import pytest

from tests.refusals import assert_refused
from value_aware_study.data.text import Docstrings


def texts(source):
    return [document.text for document in source]


@pytest.fixture
def package(tmp_path, monkeypatch):
    files = {
        "__init__.py": '"""The package."""\nraise SystemExit("imported")',
        "b.py": '''
            """Second."""
            class C:
                """A class.

                Flush.
                    Indented.
                """
                def f():
                    "Method."
                async def g():
                    """Second."""
            if True:
                try:
                    def hidden():
                        """Hidden in a branch."""
                except ValueError:
                    x = """not a docstring"""
        ''',
        "a/__init__.py": "",
        "a/nested.py": '"""Nested \\ud800 surrogate."""',
        "a/broken.py": '"""Broken."""\ndef f(:',
        "tests/test_b.py": '"""A test."""',
        "a/test_nested.py": '"""Another test."""',
    }
    for name, source in files.items():
        file = tmp_path / "toy_package" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    return "toy_package"


def test_one_document_a_module_without_repeats_and_tests(package):
    assert texts(Docstrings(package=package)) == [
        "The package.",
        "Nested  surrogate.",
        "Second.\n\nA class.\n\nFlush.\n    Indented.\n\nMethod.\n\nHidden in a branch.",
    ]


def test_a_single_module(tmp_path, monkeypatch):
    (tmp_path / "toy_module.py").write_text('"""Alone."""')
    monkeypatch.syspath_prepend(tmp_path)
    assert texts(Docstrings(package="toy_module")) == ["Alone."]


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.part"])
def test_a_missing_package_is_named(name):
    assert_refused(f"package '{name}' is not installed", texts, Docstrings(package=name))


def test_docstrings_equal_those_of_the_imported_module():
    module = importlib.import_module("networkx.algorithms.bridges")
    names = ["bridges", "has_bridges", "local_bridges"]
    expected = [inspect.getdoc(module), *(inspect.getdoc(getattr(module, n)) for n in names)]
    document = "\n\n".join(text.strip() for text in expected)
    assert any(document == text for text in texts(Docstrings(package="networkx.algorithms")))
