"""Readers use the page in Debian's Chromium."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import probed, survey_record, trained_again

from tests.report.pages import SLY, exploration, small_page
from value_aware_study.report.contents import report_page
from value_aware_study.report.frame import Results
from value_aware_study.report.page import write_page

api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no browser: apt-get install chromium"),
]
SHOWN = "[...document.querySelectorAll('.panel:not([hidden]) .chart')]"
FOCUSED = "one => one === document.activeElement"
DRAWN = f"{SHOWN}.every(c => c.dataset.drawn === 'yes')"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(small_page(), tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def engines() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="module")
def browser(engines: Any) -> Iterator[Any]:
    browser = engines.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    yield browser
    browser.close()


@pytest.fixture(scope="module", params=["chromium", "firefox"])
def each(request: pytest.FixtureRequest, engines: Any) -> Iterator[Any]:
    """Yields Chromium, and Firefox where Playwright has installed it."""
    if request.param == "chromium":
        yield request.getfixturevalue("browser")
        return
    if not Path(engines.firefox.executable_path).exists():
        pytest.skip("no Firefox: playwright install firefox")
    browser = engines.firefox.launch()
    yield browser
    browser.close()


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Any]:
    """Opens the page in its own window; it asks no network and writes nothing to the console."""
    window = browser.new_context(
        viewport={"width": 1400, "height": 1000}, color_scheme="light",
        permissions=["clipboard-read", "clipboard-write"],
    )  # fmt: skip
    tab = window.new_page()
    asked: list[str] = []
    messages: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.goto(report.as_uri())
    tab.wait_for_function(DRAWN)
    yield tab
    assert messages == [] and {url for url in asked if not url.startswith("data:")} == {
        report.as_uri()
    }
    window.close()


@pytest.fixture
def desktop(browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    yield page
    page.close()


def test_another_choice_shows_its_panels(opened: Any) -> None:
    panels = opened.locator("[data-exhibit=picked] .panel")
    assert [panels.nth(place).is_visible() for place in (0, 1)] == [True, False]
    opened.locator("[data-exhibit=picked] select").select_option("the other")
    opened.wait_for_function(DRAWN)
    assert [panels.nth(place).is_visible() for place in (0, 1)] == [False, True]
    assert panels.nth(1).locator("svg").bounding_box()["width"] > 300


def colours(tab: Any) -> list[str]:
    title = "getComputedStyle(document.querySelector('#hero-chart-1 .role-axis-title text')).fill"
    return tab.evaluate(f"[getComputedStyle(document.body).backgroundColor, {title}]")


def test_light_and_dark(opened: Any) -> None:
    light = colours(opened)
    opened.click("#page-theme")
    dark = colours(opened)
    assert all(before != after for before, after in zip(light, dark, strict=True))
    opened.reload()
    opened.wait_for_function(DRAWN)
    assert colours(opened) == dark
    opened.emulate_media(media="print")
    assert colours(opened) == light


def test_a_print_has_the_notes_and_no_controls(opened: Any) -> None:
    opened.emulate_media(media="print")
    for controls in ("button:not(.token)", ".choice", ".menu", "nav", "article .numbers"):
        assert not any(control.is_visible() for control in opened.locator(controls).all())
    assert opened.get_by_text("A note.").is_visible()
    explorer = opened.locator(".explorer select").first
    assert explorer.evaluate("one => getComputedStyle(one).appearance") == "none"


@pytest.mark.parametrize(
    ("less", "more"),
    [("2.50", "1,031.1"), ("−3.0 (−4 to 2)", "2"), ("× 0.5", "× 1.2"), ("<.01", ".2"), ("9", "–")],
)
def test_a_heading_sorts_by_number(opened: Any, less: str, more: str) -> None:
    column = opened.locator("#models-table td:nth-child(2)")
    for place, text in enumerate((more, less)):
        column.nth(place).evaluate("(cell, text) => (cell.textContent = text)", text)
    heading = opened.locator("#models-table th", has_text="error")
    heading.locator("button").focus()
    for order, texts in (("ascending", [less, more]), ("descending", [more, less])):
        opened.keyboard.press("Enter")
        assert heading.get_attribute("aria-sort") == order
        # what is unknown stands last
        assert column.all_inner_texts() == ([less, more] if more == "–" else texts)


@pytest.mark.parametrize("form", ["csv", "markdown", "latex"])
def test_a_table_is_copied(opened: Any, form: str) -> None:
    article = opened.locator("article[data-exhibit=models]")
    article.locator(".menu summary").click()
    article.locator(f"[data-copy={form}]").click()
    opened.get_by_role("status").get_by_text("Copied").wait_for()
    table = list(small_page().exhibits())[1].table
    assert table and opened.evaluate("navigator.clipboard.readText()") == getattr(table, form)()


@pytest.mark.parametrize(("form", "begins"), [("svg", b"<svg"), ("png", b"\x89PNG")])
def test_a_figure_is_saved_in_light_colours(opened: Any, form: str, begins: bytes) -> None:
    opened.click("#page-theme")
    article = opened.locator("article[data-exhibit=hero]")
    article.locator(".menu summary").click()
    with opened.expect_download() as saved:
        article.locator(f"[data-save={form}]").click()
    content = Path(saved.value.path()).read_bytes()
    assert saved.value.suggested_filename.startswith("hero") and content.startswith(begins)
    assert b"var(--blue)" not in content


def test_the_explorer_opens_on_the_hardest_token_and_shows_what_is_kept(opened: Any) -> None:
    explorer = opened.locator(".explorer")
    hardest = explorer.get_by_role("list", name="Hardest tokens").get_by_role("button")
    chosen, rows = explorer.locator(".token[aria-pressed=true]"), explorer.locator(".row")
    texts = ["the layer 3, head 0: 175% → 0.0%", "the layer 0, head 0: 25% → 0.0%"]
    assert hardest.all_inner_texts() == texts and rows.count() == 4
    mean = "the mean of all values that this query sees"
    assert f"1 key, error left 0.0%\n\n{mean}: not used" in rows.nth(3).inner_text()
    assert hardest.first.get_attribute("aria-pressed") == "true"
    assert "(median query of the model: 175% → 1.0%)" in explorer.inner_text()
    explorer.locator("button.token").last.click()
    assert chosen.inner_text().split() == ["bank", ".20"] and chosen.evaluate(FOCUSED)
    assert f"1 key and the mean, error left 1.0%\n\n{mean}: 34%" in rows.nth(3).inner_text()
    hardest.last.focus()
    opened.keyboard.press("Enter")
    assert chosen.inner_text().split() == ["the", ".50"] and hardest.last.evaluate(FOCUSED)
    explorer.locator("select[name='keys kept']").select_option("0")
    assert "1 key, error left 25%" in rows.nth(1).inner_text()
    assert "output is zero" in rows.nth(2).inner_text()
    assert "the mean alone, error left 0.0%" in rows.nth(3).inner_text()
    explorer.locator("select[name=layer]").select_option(label="3")
    assert "error left 175%" in rows.nth(1).inner_text()
    chosen.focus()
    for key, texts in (("ArrowLeft", ["bank", ".20"]), ("ArrowRight", ["the", ".50"])):
        opened.keyboard.press(key)
        assert chosen.inner_text().split() == texts and chosen.evaluate(FOCUSED)
    explorer.locator("select[name=model]").select_option(label="second")
    assert explorer.locator("select[name=layer]").input_value() == "0" and rows.count() == 3


def test_the_address_names_what_the_explorer_shows(opened: Any, report: Path) -> None:
    def shown() -> list[str]:
        names = ("model", "layer", "head", "keys kept")
        chosen = [f"select[name='{name}'] option:checked" for name in names]
        return opened.locator(
            f":is({','.join(chosen)}), .token[aria-pressed=true]"
        ).all_inner_texts()

    assert "#" not in opened.url
    opened.locator(".explorer select[name='keys kept']").select_option(label="4")
    opened.locator(".explorer button.token").last.click()
    address = "#explorer?model=tiny&layer=3&head=0&token=2&r=4"
    assert opened.url.endswith(address)
    before = shown()
    opened.goto(f"{report.as_uri()}{address}")
    opened.reload()
    opened.locator(".explorer .row").first.wait_for()
    assert shown() == before == ["tiny", "3", "0", "4", "bank\n.20"]
    for bad in ("model=none&layer=4&head=9&token=9&r=3", "layer=1&token=x", "=&%", "token=1.5"):
        opened.evaluate("bad => (location.hash = `#explorer?${bad}`)", bad)
        opened.wait_for_timeout(100)
        assert shown()[0] == "tiny" and shown()[2:4] == ["0", "4"]
    opened.evaluate("location.hash = '#explorer?model=<script>alert(1)</script>&r=1&token=1'")
    opened.get_by_text("1 key, error left 25%").wait_for()
    assert shown() == ["second", "0", "0", "1", "b\n.30"]


@pytest.fixture
def static(browser: Any) -> Iterator[Any]:
    """Opens pages without JavaScript."""
    window = browser.new_context(java_script_enabled=False)
    yield window.new_page()
    window.close()


def test_a_sentence_stands_for_the_explorer_without_javascript(static: Any, report: Path) -> None:
    static.goto(report.as_uri())
    assert f"“the {SLY}bank”" in static.locator(".explorer").inner_text()


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, records: Any, training: Any, tokens: Any
) -> Path:
    results = Results.of(
        trained_again(records, 0.5, 2.0),
        training,
        tokens,
        surveyed=[survey_record()],
        probed=[probed()],
        explored=exploration(),
    )
    page = report_page(results)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("value_aware_study.report.page.png", lambda *_: b"")
        return write_page(page, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_reports_own_page_opens_and_hinders_no_reader(
    browser: Any, whole: Path, width: int, scheme: str
) -> None:
    """It takes under 8 MB, fits its window, draws every figure, and passes axe-core."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    messages: list[str] = []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.goto(whole.as_uri())
    tab.locator("#figure_1-chart-1 svg").wait_for()
    assert whole.stat().st_size < 8e6
    tab.evaluate("document.querySelectorAll('details.folded').forEach(one => (one.open = true))")
    tab.wait_for_function(DRAWN)
    assert tab.evaluate("document.documentElement.scrollWidth") == width and messages == []
    violations = axe.Axe().run(tab).response["violations"]
    assert [(violation["id"], violation["nodes"][0]["html"]) for violation in violations] == []
    tab.close()


def test_the_contents_list_follows_the_reader_and_folds_the_rest(desktop: Any, whole: Path) -> None:
    current = "[...document.querySelectorAll('nav [aria-current]')].map(one => one.hash)"
    desktop.goto(whole.as_uri())
    desktop.wait_for_selector("#figure_1-chart-1 svg")
    desktop.evaluate("document.querySelectorAll('.folded').forEach(one => (one.open = true))")
    desktop.wait_for_function(DRAWN)
    for name in ("figure_2", "grid", "distance", "models", "claims"):
        desktop.evaluate(f"document.getElementById('{name}').scrollIntoView()")
        desktop.wait_for_function(f"{current}.join() === '#{name}'")
        assert 0 <= desktop.locator(f"nav a[href='#{name}']").bounding_box()["y"] <= 880
    assert not desktop.locator("nav a[href='#models']").is_visible()
    assert desktop.locator("nav a[href='#table_1']").inner_text() == "Table 1"


def test_a_long_table_shows_eight_rows_until_it_is_unfolded(static: Any, whole: Path) -> None:
    static.goto(whole.as_uri())
    article = static.locator("article[data-exhibit=table_1]")
    rows, visible = (article.locator(f"tbody tr{state}") for state in ("", ":visible"))
    assert visible.count() == 8
    article.locator(".more summary").click()
    assert visible.count() == rows.count() > 12


def every_figure(browser: Any, page: Path, width: int = 1400) -> Any:
    """Opens a page with all of its figures drawn, folded ones and other choices among them."""
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.goto(page.as_uri())
    tab.evaluate("document.querySelectorAll('details.folded').forEach(one => (one.open = true))")
    tab.evaluate("document.querySelectorAll('.panel').forEach(one => (one.hidden = false))")
    tab.evaluate("window.dispatchEvent(new Event('resize'))")
    tab.wait_for_function(DRAWN)
    return tab


HOVER = """() => {
  const said = {};
  const tip = () => document.getElementById("vg-tooltip-element");
  for (const chart of document.querySelectorAll(".chart")) {
    said[chart.id] = [];
    for (const mark of chart.querySelectorAll(".role-mark path, .role-mark rect")) {
      const { x, y, width, height } = mark.getBoundingClientRect();
      const at = { bubbles: true, clientX: x + width / 2, clientY: y + height / 2 };
      if (tip()) tip().innerText = "";
      mark.dispatchEvent(new PointerEvent("pointerover", at));
      mark.dispatchEvent(new PointerEvent("pointermove", at));
      if (tip()?.innerText) said[chart.id].push(tip().innerText);
      mark.dispatchEvent(new PointerEvent("pointerout", at));
    }
  }
  return said;
}"""


def test_every_mark_says_a_sentence(each: Any, whole: Path) -> None:
    tab = every_figure(each, whole)
    of_chart = tab.evaluate(HOVER)
    assert [name for name, sentences in of_chart.items() if not sentences] == []
    wrong = re.compile(r"null|undefined|\bnan\b|\n", re.IGNORECASE)
    assert not [text for some in of_chart.values() for text in some if wrong.search(text)]
    assert "paper, elu, r = 1: +3.92 nats" in of_chart["figure_2-chart-1"]
    chart = tab.locator("#figure_2-chart-1")
    chart.scroll_into_view_if_needed()
    place = chart.bounding_box()  # the mark nearest to the pointer speaks
    tab.mouse.move(place["x"] + place["width"] / 2, place["y"] + 40)
    tab.locator("#vg-tooltip-element.visible").get_by_text(", r = ").wait_for()
    tab.close()


def test_a_page_that_is_printed_at_once_has_every_figure(desktop: Any, whole: Path) -> None:
    count = "window.drawn = document.querySelectorAll('.chart svg').length"
    desktop.add_init_script(f"window.addEventListener('afterprint', () => ({count}))")
    desktop.goto(whole.as_uri(), wait_until="load")
    desktop.wait_for_selector(".chart svg")  # what figures are drawn from is unpacked by then
    soon = desktop.pdf(format="A4")
    assert len(re.findall(rb"/Type */Page\b", soon)) <= 25
    visible = f"{SHOWN}.filter(one => !one.closest('details:not([open])')).length"
    assert desktop.evaluate("window.drawn") == desktop.evaluate(visible) > 20
    desktop.wait_for_function(f"document.querySelectorAll('.chart svg').length === {visible}")
    assert len(desktop.pdf(format="A4")) == len(soon)


@pytest.mark.parametrize("width", [390, 1400])
def test_no_label_is_cut(browser: Any, whole: Path, width: int) -> None:
    tab = every_figure(browser, whole, width)
    assert tab.evaluate(CUT) == []
    tab.close()


CUT = """() => [...document.querySelectorAll(".chart svg")].flatMap((svg) => {
  const { left, right } = svg.getBoundingClientRect();
  return [...svg.querySelectorAll(".role-axis-label text, .role-legend-label text")]
    .filter((text) => {
      const at = text.getBoundingClientRect();
      return text.textContent.endsWith("…") || at.left < left - 2 || at.right > right + 2;
    })
    .map((text) => `${svg.closest(".chart").id}: ${text.textContent}`);
})"""


WIDE = """[...document.querySelectorAll(".scroll")]
  .filter((one) => one.scrollWidth > one.clientWidth)
  .map((one) => one.closest("article").dataset.exhibit)"""
WIDTHS = """[...new Set(
  [...document.querySelectorAll("td.words")].map((one) => getComputedStyle(one).minWidth)
)]"""


def test_every_table_fits_a_desktop(desktop: Any, whole: Path) -> None:
    """Those of many columns too, which stand closer on a screen; paper leaves words no room."""
    desktop.goto(whole.as_uri())
    desktop.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert desktop.evaluate(WIDE) == []
    assert len(desktop.evaluate(WIDTHS)) == 2
    desktop.emulate_media(media="print")
    assert desktop.evaluate(WIDTHS) == ["0px"]


def test_every_legend_of_every_figure_toggles_its_series(each: Any, whole: Path) -> None:
    """A click on a name makes other marks pale, a second one brings them back."""
    tab = every_figure(each, whole)
    clicked = []
    for chart in tab.locator(".chart").all():
        names = chart.locator(".role-legend-label text")
        for name in names.all() if names.count() > 1 else []:
            opacity = [opacities(chart)]
            for _ in range(2):
                name.click(force=True)  # a legend that toggles nothing is not clicked otherwise
                tab.wait_for_timeout(60)
                opacity.append(opacities(chart))
            paler = [after < before / 3 for before, after in zip(*opacity[:2], strict=True)]
            place = f"{chart.get_attribute('id')}: {name.text_content()}"
            assert any(paler) and not all(paler) and opacity[2] == opacity[0], place
            clicked.append(place.partition("-")[0])
    others = {"distance", "model_end_metric", "model_layers", "model_output_error"}
    assert others | {f"figure_{number}" for number in range(1, 8)} <= set(clicked)
    tab.close()


def opacities(chart: Any) -> list[float]:
    """Returns the opacity of every mark of a chart, without axes and legends."""
    marks = ".role-mark path, .role-mark line, .role-mark text"
    return chart.evaluate(
        f"one => [...one.querySelectorAll('{marks}')].map(mark => +(mark.getAttribute('opacity')"
        " ?? 1))"
    )
