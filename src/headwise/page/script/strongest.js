/** Strongest links of a head: the other word that each word attends to most. */
import {rowOf} from "./attention.js";
import {visibleKeys} from "./decode.js";

/** Smallest weight of a link that is listed; it is the smallest weight that is not written as "<0.01". */
const SMALLEST_LINK = 0.005;

/**
 * Return true if the first token of a text sees no other token, as in decoders. Such a token is the attention sink of most
 * decoders (Xiao et al. 2023), and would be the end of nearly all links.
 */
export function firstSeesOnlyItself({queryUnits, keyUnits, visibility}) {
  return queryUnits === keyUnits && queryUnits.of.length > 1 && visibleKeys(visibility, 0) === 1;
}

/**
 * Return the strongest links of the given rows, and the share of the shown attention that they cover.
 *
 * A link goes from a word to the other word that it attends to most. Two words that attend most to each other, both with
 * more than uniform weight, share one link, which has the smaller weight as `back`. Special tokens, punctuation and hidden
 * keys are left out, as is the first word as a key if the first token sees no other token; `onFirst` is then the share of
 * the shown attention that is on it, otherwise null.
 */
export function strongestLinks(matrix, rows, hiddenKeys, limit) {
  const {queryUnits, keyUnits} = matrix;
  const skipsFirst = firstSeesOnlyItself(matrix) && !hiddenKeys[0];
  const isWord = (units, unit) => !units.special[unit] && !units.punctuation[unit];
  const isTarget = Uint8Array.from({length: keyUnits.count}, (_, key) =>
    Number(isWord(keyUnits, key) && !hiddenKeys[key] && !(skipsFirst && key === 0)),
  );
  const best = new Map();
  let shown = 0;
  let onFirst = 0;
  for (let query = 0; query < rows.length; query++) {
    if (!rows[query]) continue;
    const {indices, weights} = rowOf(matrix, query);
    shown += matrix.rest[query];
    indices.forEach((key, place) => {
      if (hiddenKeys[key]) return;
      shown += weights[place];
      if (skipsFirst && key === 0) onFirst += weights[place];
    });
    const link = isWord(queryUnits, query) ? largestTarget(matrix, query, isTarget) : null;
    if (link) best.set(query, link);
  }
  const links = linksOf(matrix, best).slice(0, limit);
  const covered = links.reduce((sum, link) => sum + link.weight + (link.back ?? 0), 0);
  const share = sum => (shown > 0 ? sum / shown : 0);
  return {links, covered: share(covered), onFirst: skipsFirst ? share(onFirst) : null};
}

/** Return the link from a query to the target that it attends to most, or null if no weight is large enough. */
function largestTarget(matrix, query, isTarget) {
  const isSelf = matrix.queryUnits === matrix.keyUnits;
  const {indices, weights} = rowOf(matrix, query);
  let link = null;
  indices.forEach((key, place) => {
    if (!isTarget[key] || (isSelf && key === query) || weights[place] <= (link?.weight ?? 0)) return;
    link = {query, key, weight: weights[place], back: null};
  });
  return link;
}

function rounded(weight) {
  return Math.round(weight * 1e4);
}

/** Return the links that are listed, strongest first, of the strongest link of each query. */
function linksOf(matrix, best) {
  const uniform = 1 / matrix.keyUnits.count;
  const links = [];
  for (const link of best.values()) {
    const other = matrix.queryUnits === matrix.keyUnits ? best.get(link.key) : null;
    const isMutual = other?.key === link.query && Math.min(link.weight, other.weight) > uniform;
    if (isMutual && (other.weight > link.weight || (other.weight === link.weight && link.query > link.key))) continue;
    if (link.weight >= SMALLEST_LINK) links.push({...link, back: isMutual ? other.weight : null});
  }
  // Links of equal rounded weight are in the order of the text, as in the output of `headwise view`.
  return links.sort((a, b) => rounded(b.weight) - rounded(a.weight) || a.query - b.query);
}
