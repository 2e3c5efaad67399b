/** Contents of the page. Large arrays are decompressed when they are first needed. */
import {angularTable, bytesOfBase64, gunzip, parseDense, parseSparse, parseVisibility} from "./decode.js";
import {unitMatrix} from "./attention.js";
import {tilesOf} from "./tiles.js";
import {differentKinds, headKinds, nounsOf} from "./kinds.js";
import {differingParts, shortened, unitsOf} from "./words.js";

/** Numbers of heads whose decompressed attention, and whose attention between words, is kept. */
const KEPT_HEADS = 16;
const KEPT_MATRICES = 128;

/** Return the decompressed content of a data element of the page. */
async function blobOf(id) {
  return gunzip(bytesOfBase64(document.getElementById(id).textContent));
}

/** Return a function that calls `load` once for each key and keeps the last `limit` results. */
function remembered(load, limit = Infinity) {
  const results = new Map();
  return (...parameters) => {
    const key = parameters.join(" ");
    const result = results.get(key) ?? load(...parameters);
    results.delete(key);
    results.set(key, result);
    if (results.size > limit) results.delete(results.keys().next().value);
    return result;
  };
}

/** Return the contents of the page, with functions that load attention weights. */
export async function loadContents() {
  const contents = JSON.parse(document.getElementById("contents").textContent);
  const {models, passages} = contents;
  const say = nounsOf(contents);
  const statistics = contents.statistics.map(each => ({...each, unit: say(each.unit), source: say(each.source)}));
  const kinds = headKinds(contents);
  const heads = models[0].heads;
  const parts = models.length === 2 ? differingParts(...models.map(model => model.name)) : [];
  const values = new Float32Array(await blobOf("values"));
  const size = models.length * statistics.length * heads.length;
  const at = (model, statistic, head) => (model * statistics.length + statistic) * heads.length + head;

  const passageValues = remembered(async passage => new Float32Array(await blobOf(`p${passage}-values`)));
  const visibility = remembered(async (passage, index, queries) =>
    parseVisibility(await blobOf(passages[passage].visibility[index]), queries),
  );

  const tiles = remembered(async (passage, model) => {
    const bytes = new Uint8Array(await blobOf(`p${passage}-tiles-${model}`));
    const table = angularTable(255);
    let offset = 0;
    const {sides} = passages[passage];
    return passages[passage].heads[model].map(head => {
      if (!head) return null;
      const [rows, columns] = head.tiles;
      const [queries, keys] = [head.queries, head.keys].map(side => sides[side].tokens.length);
      const weights = new Float32Array(rows * columns);
      for (let tile = 0; tile < weights.length; tile++) weights[tile] = table[bytes[offset++]];
      return tilesOf(rows, columns, queries, keys, weights);
    });
  }, 4);

  const units = remembered((passage, side, merged) => unitsOf(passages[passage].sides[side], merged));

  const attention = remembered(async (passage, model, head) => {
    const stored = passages[passage].heads[model][head];
    const queries = passages[passage].sides[stored.queries].tokens.length;
    const keys = passages[passage].sides[stored.keys].tokens.length;
    const [buffer, visible] = await Promise.all([blobOf(stored.rows), visibility(passage, stored.visible, queries)]);
    return {visible, rows: (stored.storage === "dense" ? parseDense : parseSparse)(buffer, queries, keys)};
  }, KEPT_HEADS);

  const maps = remembered(async passage => {
    const numbers = new Float32Array(await blobOf(`p${passage}-maps`));
    let offset = 0;
    const next = length => numbers.subarray(offset, (offset += length));
    return passages[passage].maps.map(map => ({
      ...map,
      values: next(passages[passage].sides[map.side].tokens.length),
      curves: Object.fromEntries(map.curves.map(([name, length]) => [name, next(length)])),
    }));
  });

  const matrix = remembered(async (passage, model, head, merged) => {
    const stored = passages[passage].heads[model][head];
    const {rows, visible} = await attention(passage, model, head);
    return unitMatrix(rows, visible, units(passage, stored.queries, merged), units(passage, stored.keys, merged));
  }, KEPT_MATRICES);

  // A prompt with pictures has many rows of patches, so its page opens with the rows of the words that the model generated.
  const generated = passages.some(({sides}) => sides.some(side => side.pictures.length && side.generated !== null));

  return {
    ...contents,
    opening: {generated, ...contents.opening},
    statistics,
    heads,
    /** Letter of each of two models, with the part of its name that differs. */
    labels: parts.map((part, model) => "AB"[model] + (/^\(?[AB]\)?$/.test(part) ? "" : `: ${shortened(part, 24)}`)),
    /** Return a text of the page with the nouns for what it shows: words of a text, patches of pictures, or both. */
    say,
    /** Kind of each head. */
    kinds,
    /** The different kinds of heads in the order of display. */
    allKinds: differentKinds(kinds),
    units,
    tiles,
    matrix,
    maps,
    passageValues,
    /** Index of the head with this name, or -1. */
    headIndex: name => heads.findIndex(head => head.name === name),
    /** Role of a head, or null. */
    role: (model, head) => contents.roles[models[model]?.heads[head].role] ?? null,
    mean: (model, statistic, head) => values[at(model, statistic, head)],
    error: (model, statistic, head) => values[size + at(model, statistic, head)],
    samples: (model, statistic, head) => values[2 * size + at(model, statistic, head)],
    meanOnPassage: async (passage, model, statistic, head) =>
      (await passageValues(passage))[at(model, statistic, head)],
    /** Index of the statistic with this name, or -1. */
    statisticIndex: name => statistics.findIndex(statistic => statistic.name === name),
  };
}

/** Return a statistic's name, with its source if another source has a statistic of the same name. */
export function statisticTitle(page, index) {
  const {name, source} = page.statistics[index];
  const isRepeated = page.statistics.some((other, place) => place !== index && other.name === name);
  return isRepeated ? `${name} (${source})` : name;
}

/** Return a statistic's title with its unit, such as "entropy (nats)". */
export function statisticWithUnit(page, index) {
  const {unit} = page.statistics[index];
  return statisticTitle(page, index) + (unit ? ` (${unit})` : "");
}

/** Return true if a statistic has negative values, so that its colours diverge around 0. */
export function isSigned(page, index) {
  return page.models.some((_, model) => page.heads.some((__, head) => page.mean(model, index, head) < 0));
}

/** Return the value of a statistic for a head: of model A or B, or the difference B − A. */
export function shownValue(page, view, statistic, head) {
  if (view === "difference") return page.mean(1, statistic, head) - page.mean(0, statistic, head);
  return page.mean(view === "B" ? 1 : 0, statistic, head);
}

/**
 * Return the ranks of a head by a statistic, {first, last, of}, counted from 1 for the largest value, or null if its value
 * is unknown. `first` and `last` differ if other heads have the same value, up to rounding. `of` is the number of ranked
 * heads.
 */
export function rankOf(page, view, statistic, head) {
  const value = shownValue(page, view, statistic, head);
  if (!Number.isFinite(value)) return null;
  const all = page.heads.map((_, other) => shownValue(page, view, statistic, other)).filter(Number.isFinite);
  const error = 1e-6 * Math.max(...all.map(Math.abs));
  return {
    first: 1 + all.filter(other => other > value + error).length,
    last: all.filter(other => other >= value - error).length,
    of: all.length,
  };
}
