/** Choice and order of the heads in the overview. */
import {isSigned, shownValue} from "./data.js";

/** Return true if a search is for a head's name, such as "5.11" or "5.", and false if it is for a word of the text. */
export function isNameSearch(page, search) {
  const text = search.trim().toLowerCase();
  return page.heads.some(head => nameMatches(head.name, text));
}

function nameMatches(name, text) {
  return (
    name
      .toLowerCase()
      .split(" ")
      .some(part => part.startsWith(text)) || name.toLowerCase().startsWith(text)
  );
}

/** Return true if the role of a head is not the same in both models. */
export function roleChanged(page, head) {
  return page.models.length === 2 && page.role(0, head)?.name !== page.role(1, head)?.name;
}

/** Return the indices of the heads that the filters leave, in the chosen order. */
export function chosenHeads(page, state) {
  const view = state.get("model");
  const model = view === "B" ? 1 : 0;
  const roles = state.get("roles").map(Number);
  const kind = state.get("kind");
  const [firstLayer, lastLayer] = layerRange(state.get("layers"));
  const range = state.get("range");
  const from = bound(state.get("from"), -Infinity);
  const to = bound(state.get("to"), Infinity);
  const search = state.get("search").trim().toLowerCase();
  const byName = search && isNameSearch(page, search);
  const heads = page.heads
    .map((_, index) => index)
    .filter(index => {
      const head = page.models[model].heads[index];
      if (roles.length && !roles.includes(head.role ?? -1)) return false;
      if (head.layer < firstLayer || head.layer > lastLayer) return false;
      if (kind && page.kinds[index] !== kind) return false;
      if (state.get("changed") && !roleChanged(page, index)) return false;
      if (byName && !nameMatches(head.name, search)) return false;
      if (range === "" || !page.statistics[range]) return true;
      const value = shownValue(page, view, Number(range), index);
      return value >= from && value <= to;
    });
  return sorted(page, state, heads);
}

function sorted(page, state, heads) {
  const statistic = state.get("sort");
  if (statistic === "" || !page.statistics[statistic]) return heads;
  const value = head => {
    const number = shownValue(page, state.get("model"), Number(statistic), head);
    return Number.isFinite(number) ? number : -Infinity;
  };
  return heads.sort((a, b) => value(b) - value(a));
}

function bound(text, otherwise) {
  const number = Number(text);
  return text === "" || !Number.isFinite(number) ? otherwise : number;
}

/** Return the first and the last layer of a text such as "3" or "3-5"; an empty or malformed text means all layers. */
export function layerRange(text) {
  const match = /^\s*(\d*)\s*(-?)\s*(\d*)\s*$/.exec(text);
  if (!match || (match[1] === "" && match[3] === "")) return [0, Infinity];
  const first = match[1] === "" ? 0 : Number(match[1]);
  if (!match[2]) return [first, first];
  return [first, match[3] === "" ? Infinity : Number(match[3])];
}

/** Return the statistic that colours the heads: its index, or null if the heads' pictures are shown. */
export function colourStatistic(page, state) {
  const colour = state.get("colour");
  if (colour !== "role" && page.statistics[colour]) return Number(colour);
  if (colour === "pictures") return null;
  const needsNumbers = state.get("model") === "difference" || (!page.passages.length && !page.roles.length);
  if (!needsNumbers || !page.statistics.length) return null;
  return Math.max(page.statisticIndex("entropy"), 0);
}

/** Return true if the colours of a statistic diverge around 0 in the current view. */
export function isDiverging(page, state, statistic) {
  return state.get("model") === "difference" || isSigned(page, statistic);
}
