/** One head on one passage, of one model or as the difference of two: text, weights of the active word, and links. */
import {element, formatPercent, formatPercentAtLeast} from "./dom.js";
import {roleClass} from "./colours.js";
import {hiddenShare, shownRows} from "./attention.js";
import {differenceMatrix, differenceTiles} from "./difference.js";
import {hiddenUnits} from "./words.js";
import {createSides} from "./sides.js";
import {
  activeWeights,
  readoutList,
  readoutNotes,
  readoutSentence,
  readoutTitle,
  strongestWords,
} from "./readout.js";
import {scalesOf, tintLegend, tintStrengths, uniformWeight} from "./tint.js";
import {fillLinks} from "./links.js";
import {cellText} from "./celltext.js";
import {pinnedUnit} from "./meanattention.js";
import {createPictures} from "./pictures.js";
import {fillShares} from "./shares.js";

/**
 * Return the view of a head, {root, lists, pictures, show(head), activate(active), ...}.
 *
 * A view is loaded while its earlier content is still on the page. `current` is the content with the address it belongs
 * to: texts and weights are replaced together, and content of an earlier address is neither changed nor listened to.
 *
 * @param app the page's context
 * @param models index of the model, or the indices of both for the difference of their weights
 * @param events {over(active or null), focused(active), chosen(active, keySideWord), scrolled(unit), marked(units, others)}
 */
export function createHeadView(app, models, events) {
  const {page, state} = app;
  const [model] = models;
  const isDifference = models.length === 2;
  const name = page.models.length < 2 ? "" : isDifference ? "B − A" : "AB"[model];
  const part = type => element("div", {class: type});
  const [texts, legend, hiddenNote, shares] = ["texts", "text-legend soft", "hidden-note", "shares"].map(part);
  const [readout, links] = ["readout", "link-list"].map(part);
  const heading = () => {
    if (!name) return "";
    const title = isDifference ? "difference of the weights" : page.models[model].name;
    return element("h3", {class: "model-name"}, `${name}: ${title}`);
  };
  const pictures = createPictures(app, name, heading, onlyIf(isDrawn, events));
  const root = element("div", {}, heading(), texts, legend, hiddenNote, shares);
  const lists = element("div", {class: "lists"}, readout, links);
  let built = null;
  let current = null;
  let drawn = null;
  let active = null;
  let overlay = null;

  /** Return the settings that decide the content of a view as text. */
  function addressNow() {
    const settings = ["model", "words", "special", "first", "generated"].map(setting => state.get(setting));
    return [app.passage(), app.head(), ...settings].join(" ");
  }

  /** Return the content if it belongs to the settings, otherwise null. */
  function content() {
    return current?.address === addressNow() ? current : null;
  }

  /** Return true if the pictures belong to the settings, too. */
  function isDrawn() {
    return drawn !== null && drawn === content();
  }

  /** Return the texts, which are built again if the passage, the sides or the units changed. */
  function sidesOf(stored, passage) {
    const key = `${passage} ${stored.queries} ${stored.keys} ${state.get("words")}`;
    if (key === built?.key) return built.sides;
    const sides = createSides(app, passage, stored, onlyIf(content, events));
    built = {key, sides};
    texts.replaceChildren(...sides.parts);
    return sides;
  }

  async function load(passage, head) {
    const isPair = state.get("model") === "difference" && page.passages[passage].heads.every(heads => heads[head]);
    const each = isPair ? [0, 1] : [model];
    const [matrices, tiles] = await Promise.all([
      Promise.all(each.map(index => page.matrix(passage, index, head, state.get("words")))),
      Promise.all(models.map(index => page.tiles(passage, index))),
    ]);
    return isDifference
      ? {matrices: [differenceMatrix(...matrices)], tiles: differenceTiles(...tiles.map(heads => heads[head]))}
      : {matrices: [matrices[each.indexOf(model)], ...matrices], tiles: tiles[0][head]};
  }

  async function show(head) {
    const address = addressNow();
    const passage = app.passage();
    const called = models.map(index => page.passages[passage]?.heads[index][head]);
    const stored = called.every(Boolean) ? called[0] : null;
    let loaded = null;
    try {
      loaded = stored && (await load(passage, head));
    } finally {
      if (!loaded && address === addressNow()) {
        current = null;
        showParts(null, passage, head);
      }
    }
    if (!loaded || address !== addressNow()) return;
    showParts(stored, passage, head);
    const [matrix] = loaded.matrices;
    const sides = sidesOf(stored, passage);
    const shown = shownUnits(matrix);
    const next = {address, head, role: roleOf(head), sides, matrix, ...loaded, shown};
    current = next;
    sides.query.flag("hidden-word", flagged(shown.hiddenQueries));
    if (!sides.isSelf) sides.key.flag("hidden-word", flagged(shown.hiddenKeys));
    describeHidden();
    activate(pinnedUnit(state.get("pin"), matrix.queryUnits, matrix.keyUnits));
    await app.nextFrame();
    if (next !== content()) return;
    if (!isDifference)
      fillLinks(fillHeading(links, "Strongest links"), matrix, shown, query => {
        if (next === content()) events.chosen({axis: "query", unit: query}, false);
      });
    drawn = next;
    pictures.show(next, active);
  }

  function roleOf(head) {
    return isDifference ? null : page.role(model, head);
  }

  /** Show the parts of the view in the colour of the head, or hide them if the head has no attention here. */
  function showParts(stored, passage, head) {
    const colour = isDifference ? "difference" : roleClass(roleOf(head));
    root.className = `head-view ${colour}`;
    lists.className = `lists ${colour}`;
    pictures.root.className = `pictures ${colour}`;
    for (const node of [texts, legend, hiddenNote, shares, readout, links, pictures.content]) node.hidden = !stored;
    if (isDifference) links.hidden = true;
  }

  /** Return which rows of a matrix are shown, and which words are hidden. */
  function shownUnits(matrix) {
    const settings = {special: state.get("special"), first: state.get("first")};
    const hiddenQueries = hiddenUnits(matrix.queryUnits, settings);
    const hiddenKeys = hiddenUnits(matrix.keyUnits, settings);
    const isGenerated = state.get("generated");
    return {rows: shownRows(matrix, hiddenQueries, isGenerated), hiddenQueries, hiddenKeys, isGenerated};
  }

  function fillHeading(parent, title) {
    const body = element("div", {});
    parent.replaceChildren(element("h3", {}, title), body);
    return body;
  }

  function describeHidden() {
    const {matrix, shown} = current;
    hiddenNote.textContent = "";
    if (!shown.rows.includes(1)) hiddenNote.textContent = "All rows of this head are hidden.";
    else if (shown.hiddenKeys.includes(1) && !isDifference) {
      const share = hiddenShare(matrix, shown.rows, shown.hiddenKeys);
      const percent = matrix.exact ? formatPercent(share) : `At least ${formatPercentAtLeast(share)}`;
      hiddenNote.textContent = page.say(`${percent} of this head's attention is on hidden words.`);
    }
  }

  /** Show the attention from or to a word; the mean attention if `next` is null. */
  function activate(next) {
    if (!content()) return;
    active = next;
    const {matrix, matrices, shown, sides} = current;
    const selected = activeWeights(matrix, active, shown);
    const queries = active?.axis === "query" ? [active.unit] : [...flagged(shown.rows)];
    // Both models of a comparison have the scale of the larger weight.
    const scales = scalesOf(
      matrices.map(each => activeWeights(each, active, shown)),
      uniformWeight(matrix, queries),
    );
    const strengths = tintStrengths(selected, scales);
    const target = active?.axis === "key" ? sides.query : sides.key;
    const source = active?.axis === "key" ? sides.key : sides.query;
    if (!sides.isSelf) source.tint({indices: [], strengths: []});
    const title = readoutTitle(matrix, active, shown);
    target.tint({indices: selected.indices, strengths});
    overlay = {...selected, strengths, scales, label: title, isSigned: isDifference};
    if (!sides.isSelf) target.flag("active", new Set());
    source.flag("active", new Set(active ? [active.unit] : []));
    const strongest = strongestWords(selected);
    readout.replaceChildren(
      element("h3", {}, title),
      readoutList(matrix, strongest),
      ...readoutNotes(matrix, active, shown).map(note => element("p", {class: "soft"}, note)),
    );
    const label = `${active ? "" : "mean "}${isDifference ? "difference" : "weight"}`;
    legend.replaceChildren(
      ...tintLegend(scales, selected.units, label, isDifference),
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
    fillShares(shares, matrix, active, shown);
    if (isDrawn()) pictures.activate(active);
  }

  return {
    root,
    lists,
    pictures: pictures.root,
    show,
    activate,
    matrixView: pictures.matrixView,
    current: content,
    isDrawn,
    picture: () => (isDrawn() ? pictures.curves() : null),
    overlay: () => (content() && overlay?.units.pictures.length ? overlay : null),
    sentence: () => (content() ? readoutSentence(current.matrix, active, current.shown) : ""),
    pair: (query, key) => (content() ? cellText({matrix: current.matrix, tiles: null}, query, key, name) : ""),
    reveal: ({axis, unit}) => content()?.sides[axis].reveal(unit),
    flagTexts: (type, units) => content()?.sides.key.flag(type, units),
    select: (axis, units) => content()?.sides[axis].select(units),
    moveCurves: () => {
      if (isDrawn()) pictures.activate(active);
    },
    redraw: () => {
      if (isDrawn()) pictures.show(current, active);
    },
  };
}

/** Return event handlers that do nothing unless a condition is true. */
function onlyIf(condition, events) {
  return Object.fromEntries(
    Object.entries(events).map(([name, handler]) => [name, (...values) => condition() && handler(...values)]),
  );
}

function flagged(flags) {
  return new Set([...flags.keys()].filter(unit => flags[unit]));
}
