/** Comparison: the same sentence once per head, with the words that get most attention. */
import {byId, element, formatPercent, formatPercentAtLeast, scrollToPart, selectField} from "./dom.js";
import {propertyColour, roleColour, seriesClass} from "./colours.js";
import {drawTiles} from "./thumbnail.js";
import {roleBadge} from "./cells.js";
import {kindTitle} from "./kinds.js";
import {meanAttention} from "./meanattention.js";
import {contentWeights, sentenceLine} from "./sentence.js";
import {scalesOf, tintLegend} from "./tint.js";
import {quotedName, unitName} from "./words.js";

/** Text of the buttons that add the chosen head to the comparison. */
export const ADD_TO_COMPARISON = "Add to comparison";

/** Return a button that leads to the comparison, with the number of its lines; it is hidden if there are none. */
export function comparisonLink({state}) {
  const button = element("button", {
    type: "button",
    class: "link",
    click: () => {
      scrollToPart("tray");
      byId("tray").focus({preventScroll: true});
    },
  });
  const update = () => {
    const {length} = state.get("tray");
    button.textContent = `Comparison (${length})`;
    button.hidden = !length;
  };
  state.on(["tray"], update);
  update();
  return button;
}

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
    element("button", {type: "button", click: () => addToTray(app)}, ADD_TO_COMPARISON),
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
    const shown = await Promise.all(entries.map((entry, place) => lineOf(app, entry, place)));
    if (job !== started) return;
    const means = shown.map(line => line.mean).filter(Boolean);
    // All lines have the same scale, so that their colours can be compared.
    const scales = scalesOf(means.map(contentWeights), Math.min(...means.map(({least}) => least[least.length - 1])));
    byId("tray-empty").hidden = entries.length > 0;
    byId("tray-legend").replaceChildren(
      ...(means.length ? tintLegend(scales, means[0].units, legendText(page, means[0])) : []),
    );
    lines.replaceChildren(...shown.map(line => trayItem(app, line, scales)));
  }

  state.on(["tray", "passage", "pin", "words", "special", "first", "generated"], show);
  app.onTheme(show);
  show();
}

/** Return what the colours of the lines mean. */
function legendText({say}, {active}) {
  if (!active) return say("mean attention from all words");
  return `attention ${active.axis === "key" ? "to" : "from"} ${quotedName(active.units, active.unit)}`;
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

/** Return what a line shows: the entry, the heads of it that attended on the passage, and their mean attention. */
async function lineOf(app, entry, place) {
  const {page} = app;
  const {model, heads, layer} = members(page, entry);
  const passage = app.passage();
  const stored = page.passages[passage].heads[model];
  const first = heads.find(head => stored[head]);
  const called = heads.filter(
    head => stored[head] && stored[head].keys === stored[first].keys && stored[head].queries === stored[first].queries,
  );
  const mean = called.length ? await meanAttention(app, passage, model, called) : null;
  const picture = called.length ? await meanPicture(app, passage, model, called, place) : null;
  return {entry, place, model, heads, layer, called, mean, picture};
}

function trayItem(app, {entry, place, model, heads, layer, called, mean, picture}, scales) {
  const {page, state} = app;
  const prefix = page.models.length === 2 ? `${"AB"[model]} ` : "";
  const isHead = layer === null;
  const name =
    prefix + (isHead ? `head ${page.heads[heads[0]].name}` : `layer ${layer}, mean of ${called.length} heads`);
  const role = isHead ? page.role(model, heads[0]) : null;
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
  const about = element(
    "div",
    {class: "focus-head"},
    isHead
      ? element("button", {type: "button", class: "link", click: () => app.choose(heads[0])}, name)
      : element("span", {}, name),
    page.allKinds.length > 1 ? element("span", {class: "soft"}, kindTitle(page.kinds[heads[0]])) : null,
    role ? element("span", {class: "focus-role"}, roleBadge(role), role.title) : null,
  );
  if (!mean)
    return element(
      "li",
      {class: "focus"},
      about,
      element("p", {class: "soft"}, "The head did not attend on this passage."),
      remove,
    );
  return element(
    "li",
    {class: `focus ${seriesClass(place)}`},
    about,
    element(
      "div",
      {},
      sentenceLine(mean.units, mean.weights, scales, mean),
      element("p", {class: "soft"}, summaryOf(mean, page.say)),
    ),
    element("div", {class: "tray-end"}, picture, remove),
  );
}

/** Return the words with the most attention above uniform attention as text. */
function summaryOf({units, weights, least, exact}, say) {
  const best = [...weights.keys()]
    .filter(unit => weights[unit] > least[unit] && !units.special[unit])
    .sort((a, b) => weights[b] - weights[a])
    .slice(0, 3);
  const percent = share => (exact ? formatPercent(share) : `at least ${formatPercentAtLeast(share)}`);
  if (best.length) return best.map(unit => `${unitName(units, unit)} ${percent(weights[unit])}`).join(", ");
  return say(`no word is ${exact ? "" : "known to be "}above uniform attention`);
}

/** Return a picture of the mean of the heads' tiles. */
async function meanPicture(app, passage, model, heads, place) {
  const all = await app.page.tiles(passage, model);
  const tiles = all[heads[0]];
  const weights = tiles.weights.map(
    (_, tile) => heads.reduce((sum, head) => sum + all[head].weights[tile], 0) / heads.length,
  );
  const canvas = element("canvas", {
    class: "tray-picture",
    role: "img",
    "aria-label": "Small picture of the matrix: rows are queries, columns are keys",
  });
  drawTiles(
    canvas,
    {...tiles, weights},
    144,
    propertyColour("--panel"),
    propertyColour(`--${seriesClass(place)}`) ?? roleColour(null),
  );
  return canvas;
}
