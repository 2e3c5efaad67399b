/** One head on one passage, of one model or as the difference of two: text, weights of the active word, and links. */
import {element, formatPercent, formatPercentAtLeast} from "./dom.js";
import {roleClass} from "./colours.js";
import {hiddenShare, shownRows} from "./attention.js";
import {differenceMatrix, differenceTiles} from "./difference.js";
import {hiddenUnits} from "./words.js";
import {createText} from "./text.js";
import {
  activeWeights,
  largestOf,
  readoutList,
  readoutNotes,
  readoutSentence,
  readoutTitle,
  strongestWords,
} from "./readout.js";
import {strengthOfLargest, tintScale, tintStrengths} from "./tint.js";
import {fillLinks} from "./links.js";
import {cellText} from "./celltext.js";
import {createPictures} from "./pictures.js";

/**
 * Return the view of a head, {root, lists, pictures, show(head), activate(active), ...}.
 *
 * @param app the page's context
 * @param models index of the model, or the indices of both for the difference of their weights
 * @param events {over(active or null), focused(active), chosen(active, keySideWord)}
 */
export function createHeadView(app, models, events) {
  const {page, state} = app;
  const [model] = models;
  const isDifference = models.length === 2;
  const name = page.models.length < 2 ? "" : isDifference ? "B − A" : "AB"[model];
  const part = type => element("div", {class: type});
  const [texts, legend, hiddenNote] = ["texts", "text-legend soft", "hidden-note"].map(part);
  const [readout, links] = ["readout", "link-list"].map(part);
  const heading = () => {
    if (!name) return "";
    const title = isDifference ? "difference of the weights" : page.models[model].name;
    return element("h3", {class: "model-name"}, `${name}: ${title}`);
  };
  const pictures = createPictures(app, name, heading, events);
  const root = element("div", {}, heading(), texts, legend, hiddenNote);
  const lists = element("div", {class: "lists"}, readout, links);
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
    const build = (side, axis, label) =>
      createText({
        side: page.passages[passage].sides[side],
        units: page.units(passage, side, merged),
        label: `${label}: press Enter to pin a ${page.say("word")}, and the arrow keys to move`,
        over: unit => events.over(unit === null ? null : {axis: axis(), unit}),
        focused: unit => events.focused({axis: axis(), unit}),
        chosen: unit => events.chosen({axis: axis(), unit}, side === stored.keys),
      });
    const direction = () => (state.get("direction") === "from" ? "query" : "key");
    const query = build(stored.queries, isSelf ? direction : () => "query", isSelf ? page.say("Words") : "Queries");
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
    const passage = app.passage();
    const called = models.map(index => page.passages[passage]?.heads[index][head]);
    const stored = called.every(Boolean) ? called[0] : null;
    const job = (started = {});
    const role = isDifference ? null : page.role(model, head);
    const isImage = stored && page.passages[passage].sides[stored.keys].image;
    const colour = isDifference ? "difference" : roleClass(role);
    root.className = `head-view ${colour}${isImage ? " shows-image" : ""}`;
    lists.className = `lists ${colour}`;
    pictures.root.className = `pictures ${colour}`;
    for (const node of [texts, legend, hiddenNote, readout, links, pictures.content]) node.hidden = !stored;
    if (!stored) {
      current = null;
      return;
    }
    links.hidden = isDifference;
    prepareTexts(stored, passage);
    const {matrices, tiles} = await load(passage, head);
    if (job !== started) return;
    const [matrix] = matrices;
    const settings = {special: state.get("special"), first: state.get("first")};
    const hiddenQueries = hiddenUnits(matrix.queryUnits, settings);
    const hiddenKeys = hiddenUnits(matrix.keyUnits, settings);
    const shown = {rows: shownRows(matrix, hiddenQueries, state.get("generated")), hiddenQueries, hiddenKeys};
    current = {head, matrix, matrices, shown, tiles, role};
    sides.query.flag("hidden-word", flagged(hiddenQueries));
    if (!sides.isSelf) sides.key.flag("hidden-word", flagged(hiddenKeys));
    describeHidden();
    activate(active);
    await app.nextFrame();
    if (job !== started) return;
    if (!isDifference)
      fillLinks(fillHeading(links, "Strongest links"), matrix, shown, query =>
        events.chosen({axis: "query", unit: query}, false),
      );
    pictures.show(current, active);
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
    else if (shown.hiddenKeys.includes(1) && !isDifference) {
      const share = hiddenShare(matrix, shown.rows, shown.hiddenKeys);
      const percent = matrix.exact ? formatPercent(share) : `At least ${formatPercentAtLeast(share)}`;
      hiddenNote.textContent = page.say(`${percent} of this head's attention is on hidden words.`);
    }
  }

  /** Show the attention from or to a word; the mean attention if `next` is null. */
  function activate(next) {
    active = next;
    if (!current) return;
    const {matrix, matrices, shown} = current;
    const selected = activeWeights(matrix, active, shown);
    // Both models of a comparison have the scale of the larger weight.
    const {largest, uniform} = largestOf(matrices, active, shown);
    const scale = {largest, strength: strengthOfLargest(largest, uniform)};
    const strengths = tintStrengths(selected.weights, scale);
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
    const label = `${active ? "" : "mean "}${isDifference ? "difference" : "weight"}`;
    legend.replaceChildren(
      largest > 0 ? tintScale(scale, label, isDifference) : "",
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
    pictures.activate(active);
  }

  return {
    root,
    lists,
    pictures: pictures.root,
    show,
    activate,
    matrixView: pictures.matrixView,
    current: () => current,
    picture: pictures.curves,
    sentence: () =>
      current
        ? readoutSentence(current.matrix, active, strongestWords(activeWeights(current.matrix, active, current.shown)))
        : "",
    pair: (query, key) => (current ? cellText({matrix: current.matrix, tiles: null}, query, key, name) : ""),
    reveal: ({axis, unit}) => {
      if (sides) sides[axis].reveal(unit);
    },
    flagTexts: (type, units) => {
      if (sides) sides.key.flag(type, units);
    },
    select: (axis, units) => {
      if (sides) (axis === "key" ? sides.key : sides.query).select(units);
    },
    redraw: () => {
      if (current) pictures.show(current, active);
    },
  };
}

function flagged(flags) {
  return new Set([...flags.keys()].filter(unit => flags[unit]));
}
