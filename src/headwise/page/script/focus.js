/** Focus of a head: the share of attention that marked words receive, or exchange with each other. */
import {visibleKeys} from "./decode.js";

/** Share of the attention from which a head has a focus. */
export const FOCUS_SHARE = 0.5;

/**
 * Return the focus of a head on marked words, {share, uniform, rows, exact}, or null if no row counts.
 *
 * Rows are query words that are not special and have a visible key. For "received" they are words that are not marked,
 * and the share is their mean attention on the marked words. For "exchanged" they are marked words, and the share is
 * their mean attention on the other marked words. `uniform` is the share that uniform attention would have.
 *
 * @param matrix word-level matrix of the head
 * @param marked Set of marked key words
 * @param kind "received" or "exchanged"
 * @param sameSide true if queries and keys are the words of the same text
 */
export function focusOf(matrix, marked, kind, sameSide = true) {
  const {queryUnits} = matrix;
  let share = 0;
  let uniform = 0;
  let rows = 0;
  for (let query = 0; query < queryUnits.count; query++) {
    const isMarked = sameSide && marked.has(query);
    if (queryUnits.special[query] || !matrix.visible[query] || isMarked !== (kind === "exchanged")) continue;
    const targets = kind === "exchanged" ? [...marked].filter(word => word !== query) : [...marked];
    const expected = uniformShare(matrix, query, targets);
    if (kind === "exchanged" && expected === 0) continue;
    rows += 1;
    uniform += expected;
    for (let entry = matrix.start[query]; entry < matrix.start[query + 1]; entry++) {
      const key = matrix.key[entry];
      if (marked.has(key) && (kind === "received" || key !== query)) share += matrix.weight[entry];
    }
  }
  return rows ? {share: share / rows, uniform: uniform / rows, rows, exact: matrix.exact} : null;
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

/** Return scores sorted by share above uniform attention, best first. Scores without a focus are left out. */
export function rankedScores(scores) {
  return scores
    .filter(score => score.focus)
    .sort((a, b) => b.focus.share - b.focus.uniform - (a.focus.share - a.focus.uniform));
}

/** Return the result of a search for heads with a focus as a sentence. */
export function focusVerdict(ranked, nameOf, format) {
  if (!ranked.length) return "No head has a row of attention that counts for these words.";
  const bound = ranked[0].focus.exact ? "" : "at least ";
  const having = ranked.filter(score => score.focus.share >= FOCUS_SHARE);
  const {share, uniform} = ranked[0].focus;
  const best = `head ${nameOf(ranked[0].head)}, with a share of ${bound}${format(share)} where uniform attention has ${format(uniform)}`;
  if (!having.length) return `No head puts half of its attention on these words; the largest excess is that of ${best}.`;
  const count = having.length === 1 ? "One head puts" : `${having.length} heads put`;
  return `${count} at least half of the attention on these words. The largest excess is that of ${best}.`;
}
