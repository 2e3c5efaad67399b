/** One head of one model on one passage: text, weights of the active word, links, matrix and curves. */
import {element, formatListed, formatPercent, formatPercentAtLeast, formatWeight} from "./dom.js";
import {cssColour, roleClass, roleColour} from "./colours.js";
import {hiddenShare, shownRows, weightAt} from "./attention.js";
import {hiddenUnits, unitName} from "./words.js";
import {createText} from "./text.js";
import {
  activeWeights,
  readoutList,
  readoutNotes,
  readoutSentence,
  readoutTitle,
  strongestWords,
  tintStrengths,
} from "./readout.js";
import {fillLinks} from "./links.js";
import {highlightLines, linesPicture, linesTitle} from "./lines.js";
import {createMatrixView, matrixUnits} from "./matrixview.js";

/**
 * Return the view of a head of one model, {root, pictures, show(head), activate(active), ...}.
 *
 * @param app the page's context
 * @param model index of the model
 * @param events {over(active or null), focused(active), chosen(active, keySideWord)}
 */
export function createHeadView(app, model, events) {
  const {page, state} = app;
  const part = name => element("div", {class: name});
  const [texts, legend, hiddenNote, readout, links, lines] = [
    "texts",
    "text-legend soft",
    "hidden-note",
    "readout",
    "link-list",
    "curves",
  ].map(part);
  const matrixView = createMatrixView(app, {
    title: "Matrix of the head's attention weights. The list of links has the strongest weights as text.",
    over: pair => events.over(pair && {axis: "query", unit: pair.query}),
  });
  const name = () =>
    page.models.length === 2 ? element("h3", {class: "model-name"}, `${"AB"[model]}: ${page.models[model].name}`) : "";
  const pictures = element(
    "div",
    {class: "pictures"},
    name(),
    element("div", {}, element("h3", {}, "Matrix"), matrixView.root),
    lines,
  );
  const root = element(
    "div",
    {class: "head-view"},
    name(),
    texts,
    legend,
    hiddenNote,
    element("div", {class: "lists"}, readout, links),
  );
  let sides = null;
  let textKey = "";
  let current = null;
  let active = null;
  let started = null;

  /** Build the texts again if the passage, the sides or the units changed. */
  function prepareTexts(stored, passage) {
    const merged = state.get("words");
    const key = `${passage} ${stored.queries} ${stored.keys} ${merged}`;
    if (key === textKey) return;
    textKey = key;
    const isSelf = stored.queries === stored.keys;
    const build = (side, axis, name) =>
      createText({
        side: page.passages[passage].sides[side],
        units: page.units(passage, side, merged),
        label: `${name}: press Enter to pin a word, and the arrow keys to move`,
        over: unit => events.over(unit === null ? null : {axis: axis(), unit}),
        focused: unit => events.focused({axis: axis(), unit}),
        chosen: unit => events.chosen({axis: axis(), unit}, side === stored.keys),
      });
    const direction = () => (state.get("direction") === "from" ? "query" : "key");
    const query = build(stored.queries, isSelf ? direction : () => "query", isSelf ? "Words" : "Queries");
    sides = {query, key: isSelf ? query : build(stored.keys, () => "key", "Keys"), isSelf};
    const titled = (text, title) =>
      element("div", {class: "side"}, element("h3", {class: "side-title"}, title), text.root);
    const names = page.passages[passage].sides.map(side => side.name);
    texts.replaceChildren(
      ...(isSelf
        ? [query.root]
        : [titled(query, `Queries: ${names[stored.queries]}`), titled(sides.key, `Keys: ${names[stored.keys]}`)]),
    );
  }

  async function show(head) {
    const passage = app.passage();
    const stored = page.passages[passage]?.heads[model][head];
    const job = (started = {});
    root.className = `head-view ${roleClass(page.role(model, head))}`;
    for (const node of [texts, legend, hiddenNote, readout, links, pictures]) node.hidden = !stored;
    if (!stored) {
      current = null;
      return;
    }
    prepareTexts(stored, passage);
    const [matrix, tiles] = await Promise.all([
      page.matrix(passage, model, head, state.get("words")),
      page.tiles(passage, model),
    ]);
    if (job !== started) return;
    const settings = {special: state.get("special"), first: state.get("first")};
    const hiddenQueries = hiddenUnits(matrix.queryUnits, settings);
    const hiddenKeys = hiddenUnits(matrix.keyUnits, settings);
    const shown = {rows: shownRows(matrix, hiddenQueries, state.get("generated")), hiddenQueries, hiddenKeys};
    current = {head, matrix, shown, tiles: tiles[head], role: page.role(model, head)};
    sides.query.flag("hidden-word", flagged(hiddenQueries));
    if (!sides.isSelf) sides.key.flag("hidden-word", flagged(hiddenKeys));
    describeHidden();
    activate(active);
    await app.nextFrame();
    if (job !== started) return;
    fillLinks(fillHeading(links, "Strongest links"), matrix, shown, query =>
      events.chosen({axis: "query", unit: query}, false),
    );
    showPictures();
  }

  function fillHeading(parent, title) {
    const body = element("div", {});
    parent.replaceChildren(element("h3", {}, title), body);
    return body;
  }

  function describeHidden() {
    const {matrix, shown} = current;
    hiddenNote.textContent = "";
    if (state.get("generated") && !matrix.queryUnits.generated.includes(1))
      hiddenNote.textContent = "This head has no rows of generated words.";
    else if (!shown.rows.includes(1)) hiddenNote.textContent = "All rows of this head are hidden.";
    else if (shown.hiddenKeys.includes(1)) {
      const share = hiddenShare(matrix, shown.rows, shown.hiddenKeys);
      const percent = matrix.exact ? formatPercent(share) : `At least ${formatPercentAtLeast(share)}`;
      hiddenNote.textContent = `${percent} of this head's attention is on hidden words.`;
    }
  }

  function showPictures() {
    const {matrix, shown, tiles, role, head} = current;
    const largest = matrix.weight.reduce((a, b) => Math.max(a, b), 0) || 1;
    matrixView.show({matrix, tiles, role, largest, ...matrixUnits(matrix, shown, state.get("generated"))});
    matrixView.setActive(active);
    const picture = linesPicture(matrix, shown, cssColour(roleColour(role)), linesTitle(page.heads[head].name, matrix));
    lines.replaceChildren(...(picture ? [element("h3", {}, "Curves"), picture] : []));
    if (!picture) return;
    const wordOf = event => {
      const word = event.target.closest(".line-word");
      if (!word) return null;
      return word.dataset.query
        ? {axis: "query", unit: Number(word.dataset.query)}
        : {axis: "key", unit: Number(word.dataset.key)};
    };
    picture.addEventListener("pointerover", event => events.over(wordOf(event)));
    picture.addEventListener("pointerleave", () => events.over(null));
    picture.addEventListener("click", event => {
      const word = wordOf(event);
      if (word) events.chosen(word, false);
    });
    highlightLines(picture, active);
  }

  /** Show the attention from or to a word; the mean attention if `next` is null. */
  function activate(next) {
    active = next;
    if (!current) return;
    const {matrix, shown} = current;
    const selected = activeWeights(matrix, active, shown);
    const strengths = tintStrengths(selected.weights, !active);
    const target = active?.axis === "key" ? sides.query : sides.key;
    const source = active?.axis === "key" ? sides.key : sides.query;
    if (!sides.isSelf) source.tint({indices: [], strengths: []});
    target.tint({indices: selected.indices, strengths});
    if (!sides.isSelf) target.flag("active", new Set());
    source.flag("active", new Set(active ? [active.unit] : []));
    const strongest = strongestWords(selected);
    readout.replaceChildren(
      element("h3", {}, readoutTitle(matrix, active)),
      readoutList(matrix, strongest),
      ...readoutNotes(matrix, active, shown).map(note => element("p", {class: "soft"}, note)),
    );
    const darkest = active ? 1 : (strongest[0]?.weight ?? 0);
    legend.replaceChildren(
      darkest > 0 ? `The full colour is a ${active ? "" : "mean "}weight of ${formatWeight(darkest)}.` : "",
      sides.query.units.generated.includes(1)
        ? element(
            "span",
            {},
            " Words that the model generated are ",
            element("span", {class: "generated"}, "underlined with dots"),
            ".",
          )
        : "",
    );
    matrixView.setActive(active);
    const picture = lines.querySelector("svg");
    if (picture) highlightLines(picture, active);
  }

  return {
    root,
    pictures,
    show,
    activate,
    matrixView,
    current: () => current,
    picture: () => lines.querySelector("svg"),
    sentence: () =>
      current
        ? readoutSentence(current.matrix, active, strongestWords(activeWeights(current.matrix, active, current.shown)))
        : "",
    pair: (query, key) => {
      const matrix = current?.matrix;
      const weight = matrix && weightAt(matrix, query, key);
      return weight === null || weight === undefined
        ? ""
        : `${unitName(matrix.queryUnits, query)} → ${unitName(matrix.keyUnits, key)}: ` +
            `${matrix.exact ? "" : "at least "}${formatListed(matrix, weight)}`;
    },
    reveal: ({axis, unit}) => {
      if (sides) sides[axis].reveal(unit);
    },
    flagTexts: (name, units) => {
      if (sides) sides.key.flag(name, units);
    },
    select: (axis, units) => {
      if (sides) (axis === "key" ? sides.key : sides.query).select(units);
    },
    redraw: () => {
      if (current) showPictures();
    },
  };
}

function flagged(flags) {
  return new Set([...flags.keys()].filter(unit => flags[unit]));
}
