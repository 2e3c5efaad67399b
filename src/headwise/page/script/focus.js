/** Focus of a head: the share of attention that marked words receive, or exchange with each other. */
import {visibleKeys} from "./decode.js";
import {quotedName} from "./words.js";

/** Share of the attention from which a head has a focus. */
const FOCUS_SHARE = 0.5;

/** Largest excess over uniform attention that rounding of the stored weights can cause. */
const EXCESS_ERROR = 1e-4;

/** Names of heads that a verdict lists. */
const LISTED_NAMES = 8;

/**
 * Return the focus of a head on marked words, {share, upper, uniform, rows, exact, other}, or null if no row counts.
 *
 * Rows are query words that are not special and have a visible key. For "received" they are words that are not marked,
 * and the share is their mean attention on the marked words. For "exchanged" they are marked words, and the share is
 * their mean attention on the other marked words. `uniform` is the share that uniform attention would have. If the
 * matrix lists only the largest weights, `share` is a lower bound of the share, and `upper` an upper bound. `other` is the
 * word that is not marked with the largest mean attention of these rows, {unit, share}.
 *
 * @param matrix word-level matrix of the head
 * @param marked Set of marked key words
 * @param kind "received" or "exchanged"
 * @param sameSide true if queries and keys are the words of the same text
 * @param chosen Set of the query words that count; null for those above
 */
export function focusOf(matrix, marked, kind, sameSide = true, chosen = null) {
  const {queryUnits} = matrix;
  const sums = new Float64Array(matrix.keyUnits.count);
  let share = 0;
  let rest = 0;
  let uniform = 0;
  let rows = 0;
  for (let query = 0; query < queryUnits.count; query++) {
    const isMarked = sameSide && marked.has(query);
    const isRow = chosen ? chosen.has(query) : !queryUnits.special[query] && isMarked === (kind === "exchanged");
    if (!isRow || !matrix.visible[query]) continue;
    const targets = kind === "exchanged" ? [...marked].filter(word => word !== query) : [...marked];
    const expected = uniformShare(matrix, query, targets);
    if (kind === "exchanged" && expected === 0) continue;
    rows += 1;
    uniform += expected;
    rest += matrix.rest[query];
    for (let entry = matrix.start[query]; entry < matrix.start[query + 1]; entry++) {
      const key = matrix.key[entry];
      if (!marked.has(key)) sums[key] += matrix.weight[entry];
      else if (kind === "received" || key !== query) share += matrix.weight[entry];
    }
  }
  if (!rows) return null;
  const unit = sums.indexOf(sums.reduce((largest, sum) => Math.max(largest, sum), 0));
  return {
    share: share / rows,
    upper: Math.min((share + rest) / rows, 1),
    uniform: uniform / rows,
    rows,
    exact: matrix.exact,
    other: {unit, share: sums[unit] / rows},
  };
}

/** Return a sentence about the word that gets more attention than the marked words, or "" if there is none. */
export function otherWordNote({upper, exact, other}, units, nameOfHead, {percent, atLeast}) {
  if (other.share <= upper + EXCESS_ERROR) return "";
  const name = units.special[other.unit] ? units.labels[other.unit] : quotedName(units, other.unit);
  return `Head ${nameOfHead} puts more on ${name}: ${exact ? percent(other.share) : `at least ${atLeast(other.share)}`}.`;
}

/** Return the share of the visible tokens of a query word that belong to the target words. */
function uniformShare(matrix, query, targets) {
  const {queryUnits, keyUnits, visibility} = matrix;
  let sum = 0;
  let tokens = 0;
  for (let token = queryUnits.first[query]; token < queryUnits.first[query + 1]; token++) {
    const all = visibleKeys(visibility, token);
    if (!all) continue;
    tokens += 1;
    for (const word of targets)
      sum += visibleKeys(visibility, token, keyUnits.first[word], keyUnits.first[word + 1]) / all;
  }
  return tokens ? sum / tokens : 0;
}

/** Return scores sorted by share (or its lower bound) above uniform attention, best first. Scores without a focus are left out. */
export function rankedScores(scores) {
  return scores
    .filter(score => score.focus)
    .sort((a, b) => b.focus.share - b.focus.uniform - (a.focus.share - a.focus.uniform));
}

/** Return "yes" if a head has the focus, "no" if it has not, and "unknown" if the stored weights do not decide it. */
export function hasFocus({share, upper, uniform}) {
  const reaches = bound => bound >= FOCUS_SHARE && bound - uniform > EXCESS_ERROR;
  if (reaches(share)) return "yes";
  return reaches(upper) ? "unknown" : "no";
}

/**
 * Return the result of a search for heads with a focus as a sentence.
 *
 * @param ranked scores of heads, best first
 * @param kind "received" or "exchanged"
 * @param nameOf function that returns the name of a head
 * @param formats {percent, atLeast}: functions that return a share, and a lower bound of a share, as text
 */
export function focusVerdict(ranked, kind, nameOf, {percent, atLeast}) {
  if (!ranked.length) return "No head has a row of attention that counts for these words.";
  const names = ranked.filter(score => hasFocus(score.focus) === "yes").map(score => nameOf(score.head));
  const isExact = ranked.every(score => score.focus.exact);
  const isMany = names.length > 1;
  const place = kind === "exchanged" ? "among" : "on";
  const rule =
    `at least half of ${isMany ? "their" : "its"} attention is ${place} these words, ` +
    "more than under uniform attention.";
  if (names.length && isExact)
    return `${isMany ? "Heads" : "Head"} ${listedNames(names)} ${isMany ? "have" : "has"} this focus: ${rule}`;
  if (names.length) return `At least ${isMany ? `${names.length} heads have` : "one head has"} this focus: ${rule}`;
  const {head, focus} = ranked[0];
  const bound = focus.share < 0.001 ? "an unknown share" : `at least ${atLeast(focus.share)}`;
  const closest =
    `Head ${nameOf(head)} comes closest: ${isExact ? percent(focus.share) : bound} ` +
    `(uniform attention: ${percent(focus.uniform)}).`;
  const isUnknown = ranked.some(score => hasFocus(score.focus) === "unknown");
  const reason = isUnknown ? ", because the page stores only the largest weights of this text" : "";
  const isHalf = ranked.some(score => score.focus.share >= FOCUS_SHARE);
  const end = `${isHalf ? " and more than under uniform attention" : ""}${reason}. ${closest}`;
  if (kind === "received")
    return `No head ${isUnknown ? "is known to put" : "puts"} at least half of its attention on these words${end}`;
  const words = isUnknown ? "is it known that these words" : "do these words";
  return `In no head ${words} put at least half of their attention on each other${end}`;
}

/** Return the first names, and how many others there are. */
function listedNames(names) {
  const others = names.length - LISTED_NAMES;
  const first = names.slice(0, LISTED_NAMES).join(", ");
  return others > 0 ? `${first} and ${others} other${others === 1 ? "" : "s"}` : first;
}
