/** Attention of the active word, as strengths for the tint and as sentences and lists. */
import {columnOf, receivedAttention, rowOf} from "./attention.js";
import {ROUNDED_DOWN, element, formatAtMost, formatBound, formatListed, formatWeight} from "./dom.js";
import {nounOf, quotedName, unitName} from "./words.js";

/** Number of words that are listed for the active word. */
const LISTED = 8;

/**
 * Return the weights that the active word selects: {indices, weights, units}, without hidden words.
 *
 * @param matrix matrix of a head
 * @param active {axis: "query" or "key", unit}, or null for the mean attention that each key receives
 * @param shown {rows, hiddenQueries, hiddenKeys}: flags of rows that count and of hidden words
 */
export function activeWeights(matrix, active, {rows, hiddenKeys}) {
  if (!active) {
    const received = receivedAttention(matrix, rows);
    const indices = [...received.keys()].filter(key => received[key] !== 0 && !hiddenKeys[key]);
    return {indices, weights: indices.map(key => received[key]), units: matrix.keyUnits};
  }
  const isQuery = active.axis === "query";
  const {indices, weights} = (isQuery ? rowOf : columnOf)(matrix, active.unit);
  const places = [...indices.keys()].filter(place => (isQuery ? !hiddenKeys[indices[place]] : rows[indices[place]]));
  return {
    indices: places.map(place => indices[place]),
    weights: places.map(place => weights[place]),
    units: isQuery ? matrix.keyUnits : matrix.queryUnits,
  };
}

/** Return the largest weights or differences that are not 0 with the names of their words, largest first. */
export function strongestWords({indices, weights, units}, limit = LISTED) {
  const order = [...indices.keys()]
    .filter(place => weights[place] !== 0)
    .sort((a, b) => Math.abs(weights[b]) - Math.abs(weights[a]))
    .slice(0, limit);
  return order.map(place => ({unit: indices[place], name: unitName(units, indices[place]), weight: weights[place]}));
}

/** Return the heading of the list of words for the active word. */
export function readoutTitle(matrix, active, {isGenerated}) {
  const {noun} = matrix.keyUnits;
  const rows = isGenerated && matrix.queryUnits.generated.includes(1) ? " from generated words" : "";
  if (!active) return `Mean ${matrix.signed ? "difference of the " : ""}attention that each ${noun} receives${rows}`;
  const what = matrix.signed ? "Difference of the attention" : "Attention";
  if (active.axis === "query") return `${what} from ${quotedName(matrix.queryUnits, active.unit)}`;
  return `${what} to ${quotedName(matrix.keyUnits, active.unit)}`;
}

/** Return sentences about what the list for the active word does not show. */
export function readoutNotes(matrix, active, {hiddenKeys}) {
  const notes = [];
  const many = matrix.keyUnits.nouns;
  if (matrix.signed)
    return matrix.approximate
      ? ["The page stores only the largest weights; a weight that it does not store counts as 0 in a difference."]
      : [];
  if (active?.axis === "query") {
    if (!matrix.visible[active.unit]) return [`No key is visible to this ${nounOf(matrix.queryUnits, active.unit)}.`];
    const {indices, weights} = rowOf(matrix, active.unit);
    const hidden = weights.reduce((sum, weight, place) => sum + (hiddenKeys[indices[place]] ? weight : 0), 0);
    if (hidden > 0)
      notes.push(
        matrix.exact
          ? `${formatWeight(hidden)} is on hidden ${many}.`
          : `The weight on hidden ${many} is ${formatBound(hidden)}.`,
      );
    if (matrix.unlisted[active.unit] > 0)
      notes.push(
        `All ${many} that the page does not list get at most ${formatAtMost(matrix.unlisted[active.unit])} together.`,
      );
    if (matrix.total[active.unit] < 0.99)
      notes.push(`The weights of this ${nounOf(matrix.queryUnits, active.unit)} sum to ${formatWeight(matrix.total[active.unit])}.`);
  } else if (!matrix.exact)
    notes.push("The page lists only the largest weights of each row, so these are lower bounds.");
  if (!matrix.exact) notes.push(ROUNDED_DOWN);
  return notes;
}

/** Return the list of the strongest words of a matrix as an element. */
export function readoutList(matrix, strongest) {
  const largest = strongest[0]?.weight ?? 1;
  return element(
    "ol",
    {class: "bars"},
    ...strongest.map(({name, weight}) => {
      const item = element(
        "li",
        {class: weight < 0 ? "lower" : null},
        element("bdi", {class: "bar-name"}, name),
        element("span", {class: "bar"}),
        element("span", {class: "number"}, formatListed(matrix, weight)),
      );
      item.style.setProperty("--part", Math.abs(weight / Math.max(Math.abs(largest), 1e-9)).toFixed(3));
      return item;
    }),
  );
}

/** Return the active word and its strongest words as one sentence. */
export function readoutSentence(matrix, active, shown) {
  const list = strongestWords(activeWeights(matrix, active, shown), 5)
    .map(({name, weight}) => `${name} ${formatListed(matrix, weight)}`)
    .join(", ");
  return `${readoutTitle(matrix, active, shown)}: ${list || "none is shown"}.${matrix.exact ? "" : ` ${ROUNDED_DOWN}`}`;
}
