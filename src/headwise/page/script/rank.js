/** Focus of every head on marked words, computed head by head, so that the page stays responsive. */
import {nextTask} from "./dom.js";
import {focusOf, rankedScores} from "./focus.js";

/**
 * Return the heads of a model with their focus on words of a passage, best first, or null if it was cancelled.
 *
 * @param page contents of the page
 * @param job {passage, model, side, marked, kind, chosen, querySide}; `marked` is a Set of words of side `side`. If `chosen`,
 *   a Set of words of side `querySide`, is given, only their attention counts
 * @param progress called with the number of heads that are done; returns false to cancel
 */
export async function rankHeads(page, {passage, model, side, marked, kind, chosen, querySide}, progress) {
  const scores = [];
  const heads = page.passages[passage].heads[model];
  let shown = performance.now();
  for (let head = 0; head < heads.length; head++) {
    if (heads[head] && heads[head].keys === side) {
      const sameSide = heads[head].queries === heads[head].keys;
      if (chosen ? heads[head].queries === querySide : kind === "received" || sameSide) {
        const matrix = await page.matrix(passage, model, head, true);
        scores.push({head, focus: focusOf(matrix, marked, kind, sameSide, chosen)});
      }
    }
    if (performance.now() - shown < 30) continue;
    if (!progress(head + 1)) return null;
    await nextTask();
    shown = performance.now();
  }
  return progress(heads.length) ? rankedScores(scores) : null;
}

/** Return the words of a side that are equal to a text, as a Set; upper and lower case are the same. */
export function wordsEqualTo(units, text) {
  const wanted = text.trim().toLowerCase();
  return new Set(
    units.labels.flatMap((label, unit) => (label.toLowerCase() === wanted && !units.special[unit] ? [unit] : [])),
  );
}
