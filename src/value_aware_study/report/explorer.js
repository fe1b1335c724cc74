// The token explorer: which keys each choice keeps for a token that the reader picks.

// Weights span orders of magnitude: their square root keeps the small ones visible. Never more than
// half of the colour, so that the text on it can be read. Weights are recorded in hundredths.
const WHOLE = 100;
const strength = (weight) => `${Math.round(50 * Math.sqrt(weight / WHOLE))}%`;
const HARDEST = 5;

const asWeight = (weight) => (weight < 1 ? "<.01" : (weight / WHOLE).toFixed(2).replace(/^0/, ""));
const percent = (share) => {
  const digits = Math.max(0, Math.min(4, 1 - Math.floor(Math.log10(100 * share || 1))));
  return share > 0 && share < 1e-6 ? "<0.0001%" : `${(100 * share).toFixed(digits)}%`;
};
const median = (numbers) => numbers.sort((a, b) => a - b)[Math.floor(numbers.length / 2)];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  Object.assign(made, attributes);
  made.append(...children);
  return made;
}

function choice(name, options, chosen, changed) {
  const select = element("select", { name });
  options.forEach(([value, text]) => select.append(element("option", { value, textContent: text })));
  select.value = chosen;
  select.addEventListener("change", () => changed(Number(select.value)));
  return element("label", {}, name, select);
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

function explore(place, record) {
  const address = `#${place.closest("article").dataset.exhibit}?`;
  const state = { model: 0, size: Math.floor((record.sizes.length - 1) / 2) };
  const choices = element("div", { className: "choices" });
  const hard = element("div", { className: "hardest" });
  const rows = element("div", { className: "rows" });
  place.replaceChildren(choices, hard, rows);

  const model = () => record.models[state.model];
  const layers = () => [...new Set(model().heads.map((head) => head.layer))];
  const headsOf = (layer) => model().heads.filter((head) => head.layer === layer).map((head) => head.head);
  const query = () =>
    model().heads.find((head) => head.layer === state.layer && head.head === state.head).queries[state.token];
  const errorsOf = (query) => query[1][state.size].slice(0, 2).map(([, , error]) => error);

  // The queries where the first method leaves the most error above the second, the best of each head.
  // Of an error above 1, which zeros would have, 1 counts: where values almost cancel, all are large.
  function hardest() {
    const gap = ([weight, output]) => (weight === null || output === null ? -Infinity : Math.min(1, weight) - output);
    const found = model().heads.map(({ layer, head, queries }) => {
      const gaps = queries.map((one) => gap(errorsOf(one)));
      const token = gaps.indexOf(Math.max(...gaps));
      return { layer, head, token, gap: gaps[token], errors: errorsOf(queries[token]) };
    });
    return found.sort((a, b) => b.gap - a.gap).slice(0, HARDEST);
  }

  // ---- The address: a value that does not name a part of the record is ignored.

  function follow() {
    const given = new URLSearchParams(location.hash.startsWith(address) ? location.hash.slice(address.length) : "");
    const known = (all, value) => (all.includes(value) ? { found: all.indexOf(value) } : {});
    state.model = known(record.models.map((one) => one.name), given.get("model")).found ?? state.model;
    state.size = known(record.sizes, Number(given.get("r"))).found ?? state.size;
    const { layer, head, token } = hardest()[0];
    const wished = (name, all, other) => (given.get(name) && all.includes(+given.get(name)) ? +given.get(name) : other);
    state.layer = wished("layer", layers(), layer);
    state.head = wished("head", headsOf(state.layer), headsOf(state.layer).includes(head) ? head : headsOf(state.layer)[0]);
    state.token = wished("token", [...model().tokens.keys()], token);
    show();
    if (location.hash.startsWith(address)) place.closest("article").scrollIntoView();
  }

  function choose(changes) {
    Object.assign(state, changes);
    if ("model" in changes) {
      const { layer, head, token } = hardest()[0];
      Object.assign(state, { layer, head, token });
    }
    if (!headsOf(state.layer).includes(state.head)) state.head = headsOf(state.layer)[0];
    show();
    const { layer, head, token } = state;
    const named = { model: model().name, layer, head, token, r: record.sizes[state.size] };
    try { history.replaceState(null, "", address + new URLSearchParams(named)); } catch {}  // browsers limit how often
  }

  function show() {
    const focused = document.activeElement?.name;
    choices.replaceChildren(
      choice("model", record.models.map((one, place) => [place, one.label || one.name]), state.model, (v) => choose({ model: v })),
      choice("layer", layers().map((layer) => [layer, layer]), state.layer, (v) => choose({ layer: v })),
      choice("head", headsOf(state.layer).map((head) => [head, head]), state.head, (v) => choose({ head: v })),
      choice("keys kept", record.sizes.map((size, place) => [place, size]), state.size, (v) => choose({ size: v })),
    );
    hard.replaceChildren(...presets());
    const chosen = query();
    const methods = chosen[1][state.size].map((kept, place) => methodRow(record.methods[place], kept));
    rows.replaceChildren(exactRow(chosen), ...methods);
    if (focused) place.querySelector(`[name="${focused}"]`)?.focus();
  }

  function presets() {
    const all = model().heads.flatMap((head) => head.queries.map(errorsOf));
    const middle = [0, 1].map((place) => percent(median(all.map((errors) => errors[place] ?? 0))));
    const list = element("ol");
    hardest().forEach(({ layer, head, token, errors }, place) => {
      const where = `layer ${layer}, head ${head}: ${errors.map((one) => percent(one ?? 0)).join(" → ")}`;
      const button = element("button", { type: "button", name: `hardest ${place}` }, element("b", {}, shown(token)), ` ${where}`);
      button.setAttribute("aria-pressed", layer === state.layer && head === state.head && token === state.token);
      button.addEventListener("click", () => choose({ layer, head, token }));
      list.append(element("li", {}, button));
    });
    list.setAttribute("aria-label", "Hardest tokens");
    const about = `Hardest tokens with ${record.sizes[state.size]} keys, error by weight → for the output (median query of the model: ${middle.join(" → ")})`;
    return [element("p", {}, about), list];
  }

  const shown = (place) => model().tokens[place].trim() || "␣";

  function token(tag, place, weight, attributes = {}) {
    const made = element(tag, { className: "token", ...attributes }, shown(place), element("small", {}, weight === undefined ? "" : asWeight(weight)));
    if (weight === undefined) made.classList.add("left-out");
    else made.style.setProperty("--strength", strength(weight));
    made.classList.toggle("query", place === state.token);
    made.classList.toggle("goes-on", !/^\s/.test(model().tokens[place]));
    return made;
  }

  function exactRow({ 0: weights }) {
    const text = element("div", { className: "text" });
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", "The text; pick a token");
    model().tokens.forEach((_, place) => {
      const pressed = place === state.token;
      const button = token("button", place, weights[place], { type: "button", name: `token ${place}`, tabIndex: pressed ? 0 : -1 });
      button.setAttribute("aria-pressed", pressed);
      button.addEventListener("click", () => choose({ token: place }));
      text.append(button);
    });
    text.addEventListener("keydown", move);
    return row("exact attention", "the weights of every key; pick a token, or walk with the arrow keys", text);
  }

  function move(event) {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const count = model().tokens.length;
    choose({ token: (state.token + step + count) % count });
    rows.querySelector('[aria-pressed="true"]').focus();
  }

  function methodRow(name, [keys, weights, error, mean = null]) {
    const kept = new Map(keys.map((key, place) => [key, weights[place]]));
    const text = element("div", { className: "text" });
    model().tokens.forEach((_, place) => text.append(token("span", place, kept.get(place))));
    const count = keys.length === 1 ? "1 key" : `${keys.length} keys`;
    const vectors = !mean ? count : keys.length ? `${count} and the mean` : "the mean alone";
    const left = error === null ? "output is zero" : `error left ${percent(error)}`;
    const made = row(name, barred(error ?? 0, `${vectors}, ${left}`), text);
    if (mean !== null) text.before(meanOfValues(mean));
    return made;
  }

  // The weight of the mean of the values that the query sees, for a choice that may use this mean.
  function meanOfValues(weight) {
    const about = `the mean of all values that this query sees: ${weight ? percent(weight) : "not used"}`;
    return element("p", { className: "name left" }, element("b"), barred(weight, about));  // below the error
  }

  function barred(share, about) {
    const fill = element("i");
    fill.style.width = `${100 * Math.min(1, share)}%`;
    return element("span", {}, element("span", { className: "bar" }, fill), about);
  }

  function row(name, about, text) {
    const said = element("span", { className: "left" }, about);
    return element("div", { className: "row" }, element("p", { className: "name" }, element("b", {}, name), said), text);
  }

  window.addEventListener("hashchange", () => location.hash.startsWith(address) && follow());
  follow();
}
