"""A probe foretells its time and memory, in one line."""

import pytest
from probed import LENGTH, model, tokenizer, words

from value_aware_attention import probe
from value_aware_attention.measurement import foretold
from value_aware_attention.measurement.foretold import GIB, Cost

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = words(14 * 20)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (4.4, "about 4 seconds, 1.5 GiB: text"),
        (150, "about 2 minutes, 1.5 GiB: text"),
        (1200, "about 20 minutes, 1.5 GiB: text; fewer windows, the search fast or no control"),
        (7200, "about 2.0 hours, 1.5 GiB"),
    ],
)
def test_time_and_memory_are_one_line(seconds, said):
    assert str(Cost(seconds, 1.5 * GIB, "text")).startswith(said)


def test_time_follows_from_the_amounts(monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(foretold, "perf_counter", lambda: float(next(ticks)))

    def seconds(**options):
        found = probe.estimate(
            model("llama"), tokenizer(), TEXT, **{"length": LENGTH, "windows": 2, **options}
        )
        return found.seconds

    bare = seconds(control=False)
    assert seconds(windows=4, control=False) == pytest.approx(2 * bare)
    assert bare < seconds() < 2 * bare
    assert seconds(sizes=[1], control=False) < bare


def test_memory_grows_with_calls_that_are_held(monkeypatch):
    monkeypatch.setattr(foretold, "_held", lambda task: 0.0)

    def held(**options):
        return probe.estimate(
            model("gpt2"), tokenizer(), TEXT, **{"control": False, "sizes": [1], **options}
        ).bytes

    few, many = held(length=8, windows=2), held(length=8, windows=8)
    assert few < many and held(length=32, windows=2) > few
    made = model("gpt2")
    weights = sum(x.nbytes for x in made.parameters())
    assert held(length=8, windows=2, control=True) - few == weights


def test_what_does_not_fit_is_refused_before_it_is_timed():
    with pytest.raises(ValueError, match="the model has 16 positions"):
        probe.estimate(model("bert"), tokenizer(), TEXT, length=40)
