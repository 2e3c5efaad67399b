/** Comparison: the same sentence once per head, with the words that get most attention. */
import {byId, element, formatPercent, formatPercentAtLeast, selectField} from "./dom.js";
import {propertyColour, roleColour, seriesClass} from "./colours.js";
import {receivedAttention, rowOf, shownRows} from "./attention.js";
import {drawTiles} from "./thumbnail.js";
import {roleBadge} from "./cells.js";
import {sentenceLine} from "./sentence.js";
import {hiddenUnits, unitName} from "./words.js";

/** Add the chosen head to the comparison. */
export function addToTray(app) {
  addEntry(app, `${"AB"[app.model()]}${app.head()}`);
  app.announce("The head was added to the comparison.");
}

function addEntry({state}, entry) {
  state.set({tray: [...new Set([...state.get("tray"), entry])]});
}

/** Fill the comparison of several heads. */
export function createTray(app) {
  const {page, state} = app;
  const root = byId("tray");
  root.hidden = !page.passages.length;
  if (root.hidden) return;
  const lines = byId("tray-lines");
  const layers = [...new Set(page.heads.map(head => head.layer))].sort((a, b) => a - b);
  let layer = String(layers[0]);
  let started = null;
  byId("tray-tools").append(
    element("button", {type: "button", click: () => addToTray(app)}, "+ Add the chosen head"),
    selectField(
      "Layer",
      layers.map(value => ({value, text: value})),
      layer,
      value => {
        layer = value;
      },
    ),
    element(
      "button",
      {type: "button", click: () => addEntry(app, `${"AB"[app.model()]}L${layer}`)},
      "Overlay all heads of a layer",
    ),
    element("button", {type: "button", class: "quiet", click: () => state.set({tray: []})}, "Remove all"),
  );

  async function show() {
    const job = (started = {});
    const entries = state.get("tray").filter(entry => members(page, entry).heads.length);
    const items = await Promise.all(entries.map((entry, place) => trayLine(app, entry, place)));
    if (job !== started) return;
    byId("tray-empty").hidden = entries.length > 0;
    lines.replaceChildren(...items);
  }

  state.on(["tray", "passage", "pin", "words", "special", "first", "generated"], show);
  app.onTheme(show);
  show();
}

/** Return the model and the heads of an entry: of one head, or of all heads of a layer. */
function members(page, entry) {
  const match = /^([AB])(L?)(\d+)$/.exec(entry);
  const model = match?.[1] === "B" ? 1 : 0;
  const number = Number(match?.[3]);
  if (!match || !page.models[model]) return {model: 0, heads: []};
  const heads = match[2]
    ? [...page.heads.keys()].filter(head => page.heads[head].layer === number)
    : page.heads[number]
      ? [number]
      : [];
  return {model, heads, layer: match[2] ? number : null};
}

async function trayLine(app, entry, place) {
  const {page, state} = app;
  const {model, heads, layer} = members(page, entry);
  const passage = app.passage();
  const stored = page.passages[passage].heads[model];
  const first = heads.find(head => stored[head]);
  const called = heads.filter(
    head => stored[head] && stored[head].keys === stored[first].keys && stored[head].queries === stored[first].queries,
  );
  const prefix = page.models.length === 2 ? `${"AB"[model]} ` : "";
  const name =
    layer === null
      ? `${prefix}head ${page.heads[heads[0]].name}`
      : `${prefix}layer ${layer}, mean of ${called.length} heads`;
  const role = layer === null ? page.role(model, heads[0]) : null;
  const remove = element(
    "button",
    {
      type: "button",
      class: "quiet",
      "aria-label": `Remove ${name}`,
      click: () => state.set({tray: state.get("tray").filter(other => other !== entry)}),
    },
    "×",
  );
  const title =
    layer === null
      ? element("button", {type: "button", class: "link", click: () => app.choose(heads[0])}, name)
      : element("span", {}, name);
  const about = element(
    "div",
    {class: "focus-head"},
    title,
    role ? element("span", {class: "focus-role"}, roleBadge(role), role.title) : null,
  );
  if (!called.length)
    return element(
      "li",
      {class: "focus"},
      about,
      element("p", {class: "soft"}, "The head did not attend on this passage."),
      remove,
    );
  const {units, weights, uniform, query, exact, hasRows} = await meanWeights(app, passage, model, called);
  const line = sentenceLine(units, weights, {least: uniform, around: query});
  const best = [...weights.keys()]
    .filter(unit => weights[unit] > uniform && !units.special[unit])
    .sort((a, b) => weights[b] - weights[a])
    .slice(0, 3);
  const percent = share => (exact ? formatPercent(share) : `at least ${formatPercentAtLeast(share)}`);
  const none = hasRows
    ? `no word is ${exact ? "" : "known to be "}above uniform attention`
    : "This head has no rows of generated words.";
  const summary = best.map(unit => `${unitName(units, unit)} ${percent(weights[unit])}`).join(", ") || none;
  const item = element(
    "li",
    {class: `focus ${seriesClass(place)}`},
    about,
    element("div", {}, line, element("p", {class: "soft"}, summary)),
    element("div", {class: "tray-end"}, await meanPicture(app, passage, model, called, place), remove),
  );
  return item;
}

/** Return the mean attention of heads on each word: from the pinned query, or from all words. */
async function meanWeights(app, passage, model, heads) {
  const {page, state} = app;
  const pin = /^q(\d+)$/.exec(state.get("pin"));
  const matrices = await Promise.all(heads.map(head => page.matrix(passage, model, head, state.get("words"))));
  const {queryUnits, keyUnits} = matrices[0];
  const weights = new Float64Array(keyUnits.count);
  const query = pin && Number(pin[1]) < queryUnits.count ? Number(pin[1]) : null;
  const settings = {special: state.get("special"), first: state.get("first")};
  for (const matrix of matrices) {
    const values =
      query === null
        ? receivedAttention(matrix, shownRows(matrix, hiddenUnits(queryUnits, settings), state.get("generated")))
        : denseRow(matrix, query);
    values.forEach((weight, unit) => {
      weights[unit] += weight / matrices.length;
    });
  }
  hiddenUnits(keyUnits, settings).forEach((hidden, unit) => {
    if (hidden) weights[unit] = 0;
  });
  const visible = query === null ? keyUnits.count : Math.max(rowOf(matrices[0], query).indices.length, 1);
  return {
    units: keyUnits,
    weights,
    uniform: 1 / (matrices[0].exact ? visible : keyUnits.count),
    query: queryUnits === keyUnits ? query : null,
    exact: matrices.every(matrix => matrix.exact),
    hasRows: query !== null || !state.get("generated") || queryUnits.generated.includes(1),
  };
}

function denseRow(matrix, query) {
  const row = new Float64Array(matrix.keyUnits.count);
  const {indices, weights} = rowOf(matrix, query);
  indices.forEach((key, place) => {
    row[key] = weights[place];
  });
  return row;
}

/** Return a picture of the mean of the heads' tiles. */
async function meanPicture(app, passage, model, heads, place) {
  const all = await app.page.tiles(passage, model);
  const {rows, columns} = all[heads[0]];
  const weights = all[heads[0]].weights.map(
    (_, tile) => heads.reduce((sum, head) => sum + all[head].weights[tile], 0) / heads.length,
  );
  const canvas = element("canvas", {
    class: "tray-picture",
    role: "img",
    "aria-label": "Small picture of the matrix: rows are queries, columns are keys",
  });
  drawTiles(
    canvas,
    {rows, columns, weights},
    144,
    propertyColour("--panel"),
    propertyColour(`--${seriesClass(place)}`) ?? roleColour(null),
  );
  return canvas;
}
