// The token explorer: which keys each method keeps for a token that the reader picks.

// Weights span orders of magnitude: their square root keeps the small ones visible. Never more than
// half of the colour, so that the text on it can be read. Weights are recorded in thousandths.
const WHOLE = 1000;
const strength = (weight) => `${Math.round(50 * Math.sqrt(weight / WHOLE))}%`;

const asWeight = (weight) => (weight < 1 ? "<.001" : (weight / WHOLE).toFixed(3).replace(/^0/, ""));
const percent = (share) => {
  const digits = Math.max(0, Math.min(4, 1 - Math.floor(Math.log10(100 * share || 1))));
  return share > 0 && share < 1e-6 ? "<0.0001%" : `${(100 * share).toFixed(digits)}%`;
};

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

function explore(place, record) {
  const state = { model: 0, layer: 0, head: 0, size: Math.min(1, record.sizes.length - 1), token: 0 };
  state.token = Math.floor(record.models[0].tokens.length / 2);
  const choices = element("div", { className: "choices" });
  const rows = element("div", { className: "rows" });
  place.append(choices, rows);

  const model = () => record.models[state.model];
  const layers = () => [...new Set(model().heads.map((head) => head.layer))];
  const headsOf = (layer) => model().heads.filter((head) => head.layer === layer).map((head) => head.head);
  const query = () =>
    model().heads.find((head) => head.layer === state.layer && head.head === state.head).queries[state.token];

  function choose(changes) {
    Object.assign(state, changes);
    state.token = Math.min(state.token, model().tokens.length - 1);
    if (!layers().includes(state.layer)) state.layer = layers()[0];
    if (!headsOf(state.layer).includes(state.head)) state.head = headsOf(state.layer)[0];
    const focused = document.activeElement?.name;
    choices.replaceChildren(
      choice("model", record.models.map((one, place) => [place, one.name]), state.model, (v) => choose({ model: v })),
      choice("layer", layers().map((layer) => [layer, layer + 1]), state.layer, (v) => choose({ layer: v })),
      choice("head", headsOf(state.layer).map((head) => [head, head + 1]), state.head, (v) => choose({ head: v })),
      choice("keys kept", record.sizes.map((size, place) => [place, size]), state.size, (v) => choose({ size: v })),
    );
    if (focused) choices.querySelector(`[name="${focused}"]`)?.focus();
    draw();
  }

  function token(tag, place, weight, attributes = {}) {
    const text = model().tokens[place] || "␣";
    const made = element(tag, { className: "token", ...attributes }, text, element("small", {}, weight === undefined ? "" : asWeight(weight)));
    if (weight === undefined) made.classList.add("left-out");
    else made.style.setProperty("--strength", strength(weight));
    made.classList.toggle("query", place === state.token);
    return made;
  }

  function exactRow({ 0: weights }) {
    const text = element("div", { className: "text" });
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", "The text; pick a token");
    model().tokens.forEach((_, place) => {
      const button = token("button", place, weights[place], { type: "button", tabIndex: place === state.token ? 0 : -1 });
      button.setAttribute("aria-pressed", place === state.token);
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

  function methodRow(name, [keys, weights, error]) {
    const kept = new Map(keys.map((key, place) => [key, weights[place]]));
    const text = element("div", { className: "text" });
    model().tokens.forEach((_, place) => text.append(token("span", place, kept.get(place))));
    const fill = element("i");
    fill.style.width = `${100 * Math.min(1, error ?? 0)}%`;
    const bar = element("span", { className: "bar" }, fill);
    const count = keys.length === 1 ? "1 key" : `${keys.length} keys`;
    const left = error === null ? "output is zero" : `error left ${percent(error)}`;
    return row(name, element("span", {}, `${count}, ${left}`, bar), text);
  }

  function row(name, about, text) {
    const said = element("span", { className: "left" }, about);
    return element("div", { className: "row" }, element("p", { className: "name" }, element("b", {}, name), said), text);
  }

  function draw() {
    const chosen = query();
    const methods = record.methods.map((name, place) => methodRow(name, chosen[1][state.size][place]));
    rows.replaceChildren(exactRow(chosen), ...methods);
  }

  choose({});
}
