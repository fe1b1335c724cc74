// The page: figures drawn when they come into sight, tables sorted and copied, light and dark.

const packed = [...document.querySelectorAll('script[id$="-data"]')];
const unpacking = packed.map(async ({ id, textContent }) => [id, await unpacked(textContent)]);
const contents = Object.fromEntries(await Promise.all(unpacking));
const read = (exhibit) => contents[`${exhibit}-data`];
const { theme, colours } = JSON.parse(document.getElementById("page-look").textContent);
const root = document.documentElement;
const said = document.getElementById("page-said");

let silence;

function say(text) {
  said.textContent = text;
  clearTimeout(silence);
  silence = setTimeout(() => (said.textContent = ""), 2000);
}

// Files of the project are found from report/ and results/<scale>/; its site has pages of the manual.

const up = /\/results\/[^/]+\/[^/]*$/.test(location.pathname) ? "../../" : "../";
const onSite = (file) => file.replace(/^docs\//, "").replace("README", "index").replace(/\.md$/, ".html");
for (const link of document.querySelectorAll("a[data-file]")) {
  const { file } = link.dataset;
  link.href = up + (location.protocol === "https:" ? onSite(file) : file);
}

// ---- Figures. Colours are CSS variables, so that they follow the page's theme and print.

const phone = () => window.innerWidth < 600;

function fitted() {
  if (!phone()) return theme;
  const small = { labelFontSize: 12, titleFontSize: 12 };
  return {
    ...theme,
    axis: { ...theme.axis, ...small, labelLimit: 150 },
    axisX: { titleAnchor: "end" },
    legend: { ...theme.legend, columns: 1 },
    title: { ...theme.title, frame: "bounds" },
  };
}

// In a narrow place a legend is one column, whatever the figure says; one that is not shown is none.
const isNarrow = ({ clientWidth }) => clientWidth > 0 && clientWidth < 500;
function narrow(specification, width) {
  const text = JSON.stringify(specification).replace(/"columns":\d+/g, '"columns":1');
  const small = JSON.parse(text);
  const fitting = new RegExp(`.{1,${Math.floor(width / 9)}}(?:\\s|$)`, "g");
  const lines = [small.title].flat().filter((line) => typeof line === "string");
  return lines.length ? { ...small, title: lines.flatMap((line) => line.match(fitting) ?? line) } : small;
}

function draw(place, specification, config = fitted()) {
  const options = { mode: "vega-lite", renderer: "svg", actions: false, config };
  const fits = isNarrow(place) ? narrow(specification, place.clientWidth) : specification;
  return window.vegaEmbed(place, fits, options);
}

async function drawOnce(place) {
  if (place.dataset.drawn) return;
  place.dataset.drawn = "drawing";
  await draw(place, chartOf(place));
  place.dataset.drawn = "yes";
}

function chartOf(place) {
  const article = place.closest("article");
  return read(article.dataset.exhibit).charts[[...article.querySelectorAll(".chart")].indexOf(place)];
}

const charts = [...document.querySelectorAll(".chart")];
const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 200));
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    drawOnce(target);
  }
}, { rootMargin: "400px" });
charts.forEach((place) => seen.observe(place));

// The others when there is nothing else to do, and all that are missing before the page is printed.
const missing = () =>
  charts.filter((place) => !place.dataset.drawn && !place.closest("[hidden], details:not([open])"));

async function drawRest() {
  const [next] = missing();
  if (!next) return;
  await drawOnce(next);
  idle(drawRest);
}
idle(drawRest);
window.addEventListener("beforeprint", () => missing().forEach(drawOnce));

// Of a figure with choices the panels of one are shown; they are drawn once they are.
function choose({ target }) {
  const panels = [...target.closest("article").querySelectorAll(".panel")];
  const each = panels.length / target.options.length;
  panels.forEach((panel, place) => (panel.hidden = Math.floor(place / each) !== target.selectedIndex));
  window.dispatchEvent(new Event("resize"));
}
document.querySelectorAll(".choice select").forEach((select) => select.addEventListener("change", choose));

// A figure is saved in light colours on white, whatever the page shows.
const inLight = (value) =>
  JSON.parse(JSON.stringify(value).replace(/var\(--(\w+)\)/g, (found, name) => colours[name]?.[0] ?? found));

async function save(article, format) {
  const name = article.dataset.exhibit;
  const panels = article.querySelectorAll(".panel");
  for (const [place, chart] of read(name).charts.entries()) {
    if (panels[place].hidden) continue;
    const config = { ...inLight(theme), background: colours.ground[0] };
    const wide = { ...inLight(chart), width: 640, autosize: "fit-x" };
    const { view, finalize } = await draw(document.createElement("div"), wide, config);
    const link = document.createElement("a");
    link.href = await view.toImageURL(format, 2);
    link.download = `${name}${place ? `_${place + 1}` : ""}.${format}`;
    link.click();
    finalize();
  }
}

// ---- Tables.

function sort(heading) {
  const table = heading.closest("table");
  const column = heading.cellIndex;
  const ascending = heading.getAttribute("aria-sort") !== "ascending";
  const text = (row) => row.cells[column].textContent;
  const value = (row) => parseFloat(text(row).replace(/^(× |<)/, "").replace("−", "-").replaceAll(",", ""));
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    const missing = isNaN(x) - isNaN(y);
    if (missing) return missing;
    const order = isNaN(x) ? text(a).localeCompare(text(b), "en", { numeric: true }) : x - y;
    return ascending ? order : -order;
  };
  table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const rows = () => [...table.querySelectorAll("tbody tr:not(.group)")];
  const isRest = rows().map((row) => row.matches(".rest"));
  for (const body of table.tBodies) {
    body.append(...[...body.rows].filter((row) => !row.matches(".group")).sort(compare));
  }
  rows().forEach((row, place) => row.classList.toggle("rest", isRest[place]));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

document.addEventListener("click", async ({ target }) => {
  const button = target.closest("button");
  const article = target.closest("article");
  for (const menu of document.querySelectorAll(".menu[open]")) {
    if (!menu.contains(target) || button) menu.open = false;
  }
  if (button?.parentElement.matches("th")) sort(button.parentElement);
  if (button?.dataset.copy) {
    await copy(read(article.dataset.exhibit)[button.dataset.copy]);
    say(button.textContent.replace("Copy", "Copied"));
  }
  if (button?.dataset.save) save(article, button.dataset.save);
});

// ---- Light and dark, and where the reader is.

const dark = window.matchMedia("(prefers-color-scheme: dark)");
document.getElementById("page-theme").addEventListener("click", () => {
  const shown = root.dataset.theme || (dark.matches ? "dark" : "light");
  root.dataset.theme = shown === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch {}
});

// The last heading above 30% of the window is the one that is read; page.css folds other entries.
const headings = [...document.querySelectorAll("main :is(h2, h3, h4)")];
const isAbove = (heading) => heading.getBoundingClientRect().top < 0.3 * window.innerHeight;

function follow() {
  const { id } = headings.findLast(isAbove) ?? headings[0] ?? {};
  const link = document.querySelector(`nav a[href="#${id}"]`);
  if (!link || link.hasAttribute("aria-current")) return;
  document.querySelector("nav [aria-current]")?.removeAttribute("aria-current");
  link.setAttribute("aria-current", "location");
  const listed = link.checkVisibility() ? link : link.closest("nav > ul > li");
  listed.scrollIntoView({ block: "nearest", inline: "nearest" });
}
window.addEventListener("scroll", follow, { passive: true });
new ResizeObserver(follow).observe(document.body);  // also once, and where a figure has grown

document.querySelectorAll(".explorer").forEach((place) => {
  explore(place, JSON.parse(read(place.closest("article").dataset.exhibit).exploration));
});
