"""What the classes say they support is what they do and what the tests and the docs say of them."""

import re
from inspect import isabstract
from pathlib import Path

import pytest
import torch
from hydra.utils import get_class
from methods import HEAD_DIM, KERNELS, KEYS, METHODS, Method, draw

from docs.methods_table import METHODS as METHOD_DOCS
from docs.methods_table import TABLE, renewed, support
from value_aware_attention import approximations
from value_aware_attention.kernels import KERNELS as ALL_KERNELS
from value_aware_study.cards import cards

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / METHOD_DOCS).read_text()


def methods() -> dict[str, type[approximations.Approximation]]:
    """Returns every public method by name."""
    public = {name: getattr(approximations, name) for name in approximations.__all__}
    return {
        name: item
        for name, item in public.items()
        if isinstance(item, type)
        and issubclass(item, approximations.Approximation)
        and not isabstract(item)
    }


def test_every_public_method_is_in_the_list_that_drives_the_tests() -> None:
    assert {type(method.build()) for method in METHODS.values()} == set(methods().values())
    assert set(methods()) <= set(approximations.__all__)


def test_every_public_method_has_a_card() -> None:
    assert {get_class(card.target) for card in cards().values()} == set(methods().values())


def test_a_card_says_what_its_class_does() -> None:
    """The apps refuse by the card what does not go together, before they import the class."""
    for card in cards().values():
        row = support(get_class(card.target))
        assert card.causal is row.causal, card.path
        names = {kernel.__name__.lower() for kernel in row.kernels}
        assert set(card.kernels) == (names if row.kernels != ALL_KERNELS else set()), card.path


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_gradients(method: Method) -> None:
    leaves = [x.requires_grad_() for x in draw(1, 2, KEYS, HEAD_DIM, dtype=torch.float32)]
    approximation = method.build()
    approximation(*leaves, kernel=KERNELS[method.kernel or "exponential"]).sin().sum().backward()
    expected = [method.supported.gradients] * 2 + [True]
    if getattr(approximation, "share_query_key", False):
        expected[1] = False  # its keys are its queries
    assert [x.grad is not None and bool((x.grad != 0).any()) for x in leaves] == expected
    assert all(x.grad is None or x.grad.isfinite().all() for x in leaves)


def test_the_table_of_methods_is_up_to_date() -> None:
    text = (ROOT / METHOD_DOCS).read_text()
    without = TABLE.sub(r"\1", text)
    assert without != text == renewed(without), "python -m docs.methods_table writes it"
    assert len(ALL_KERNELS) == len(KERNELS)


@pytest.mark.parametrize("name", methods())
def test_the_docs_explain_every_method(name: str) -> None:
    assert re.search(rf"^\*\*`{name}\(.*\)`\*\*", DOCS, flags=re.MULTILINE), name
