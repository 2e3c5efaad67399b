/** Mean attention of several heads on words: from the pinned word, to it, or from all words. */
import {shownRows} from "./attention.js";
import {activeWeights} from "./readout.js";
import {uniformWeight} from "./tint.js";
import {hiddenUnits} from "./words.js";

/** Return the pinned word of an address, {axis, unit, units}, or null if no word of these units is pinned. */
export function pinnedUnit(text, queryUnits, keyUnits) {
  const match = /^([qk])(\d+)$/.exec(text);
  if (!match) return null;
  const axis = match[1] === "q" ? "query" : "key";
  const unit = Number(match[2]);
  const units = axis === "query" ? queryUnits : keyUnits;
  return unit < units.count ? {axis, unit, units} : null;
}

/**
 * Return the mean attention of heads, {units, weights, least, around, active, exact}.
 *
 * `weights` are those on the key words, or, if a key is pinned, those of the query words on it. `least` is the weight of
 * each word under uniform attention. If `onlyWords`, rows of patches do not count in a text that also has words.
 */
export async function meanAttention(app, passage, model, heads, onlyWords = false) {
  const {page, state} = app;
  const matrices = await Promise.all(heads.map(head => page.matrix(passage, model, head, state.get("words"))));
  const [first] = matrices;
  const {queryUnits, keyUnits} = first;
  const active = pinnedUnit(state.get("pin"), queryUnits, keyUnits);
  const settings = {special: state.get("special"), first: state.get("first")};
  const hiddenQueries = hiddenUnits(queryUnits, settings);
  const hiddenKeys = hiddenUnits(keyUnits, settings);
  const units = active?.axis === "key" ? queryUnits : keyUnits;
  const weights = new Float64Array(units.count);
  for (const matrix of matrices) {
    const rows = shownRows(matrix, hiddenQueries, state.get("generated"));
    if (onlyWords && !active && queryUnits.noun === "word or patch")
      queryUnits.patches.forEach((patch, query) => {
        if (patch) rows[query] = 0;
      });
    const selected = activeWeights(matrix, active, {rows, hiddenKeys});
    selected.indices.forEach((unit, place) => {
      weights[unit] += selected.weights[place] / matrices.length;
    });
  }
  const least = Float64Array.from({length: units.count}, (_, unit) => {
    if (active?.axis === "key") return uniformWeight(first, [unit]);
    return active ? uniformWeight(first, [active.unit]) : 1 / units.count;
  });
  return {
    units,
    weights,
    least,
    around: active && queryUnits === keyUnits ? active.unit : null,
    active,
    exact: matrices.every(matrix => matrix.exact),
  };
}
