/** Best head for each focus: the same sentence once per focus, with the words of the focus underlined. */
import {byId, element, formatPercent, formatPercentAtLeast, formatWeight} from "./dom.js";
import {receivedAttention} from "./attention.js";
import {focusOf, otherWordNote} from "./focus.js";
import {seriesClass} from "./colours.js";
import {roleBadge} from "./cells.js";
import {contentWeights, sentenceLine} from "./sentence.js";
import {scalesOf, tintLegend} from "./tint.js";

/** Fill the first block of the page, if the page has foci. */
export function createFoci(app) {
  const {page, state} = app;
  const root = byId("foci");
  root.hidden = !page.foci?.length || !page.passages.length;
  if (root.hidden) return;
  const lines = byId("foci-lines");
  let started = null;

  async function show() {
    const job = (started = {});
    const attention = await Promise.all(page.foci.map(focus => focusAttention(page, app.passage(), focus)));
    if (job !== started) return;
    const known = attention.filter(Boolean);
    const uniform = Math.min(1, ...known.map(({units}) => 1 / units.count));
    const scales = scalesOf(known.map(contentWeights), uniform);
    byId("foci-legend").replaceChildren(...(known.length ? tintLegend(scales, known[0].units, "mean weight") : []));
    lines.replaceChildren(...page.foci.map((focus, place) => focusLine(app, focus, place, attention[place], scales)));
  }

  state.on(["passage"], show);
  show();
}

/** Return the scores of a focus: of this passage if each passage has its own, otherwise those of all passages. */
function scoresOf(focus, passage) {
  return Array.isArray(focus.scores[0]) ? (focus.scores[passage] ?? []) : focus.scores;
}

function focusLine(app, focus, place, attention, scales) {
  const {page} = app;
  const best = scoresOf(focus, app.passage())[0];
  if (!best)
    return element("li", {class: "focus"}, element("h3", {}, focus.name), element("p", {class: "soft"}, focus.verdict));
  const role = page.role(best.model, best.head);
  const name = page.heads[best.head].name;
  const about = element(
    "div",
    {class: "focus-head"},
    element("h3", {}, focus.name),
    element("button", {type: "button", class: "link", click: () => app.choose(best.head)}, `head ${name}`),
    role ? element("span", {class: "focus-role"}, roleBadge(role), role.title) : null,
  );
  const line = attention
    ? sentenceLine(attention.units, attention.weights, scales, attention)
    : element("p", {class: "soft"}, "The head did not attend on this passage.");
  const error = best.error ?? best.sem;
  const numbers = element(
    "div",
    {class: "focus-share"},
    element("strong", {}, formatPercent(best.share)),
    element("span", {class: "soft"}, `uniform: ${formatPercent(best.uniform)}`),
    meter(best),
  );
  if (Number.isFinite(error)) numbers.append(element("span", {class: "soft"}, `± ${formatWeight(error)}`));
  return element(
    "li",
    {class: `focus ${seriesClass(place)}`},
    about,
    line,
    numbers,
    element("p", {class: "verdict soft"}, [focus.verdict, attention?.note].filter(Boolean).join(" ")),
  );
}

/** Return the attention of a focus's best head on each word, {units, weights, ...}, or null if it is unknown. */
async function focusAttention(page, passage, focus) {
  const best = scoresOf(focus, passage)[0];
  const stored = best && page.passages[passage].heads[best.model][best.head];
  if (!stored) return null;
  const words = new Set(focus.words[passage]);
  const matrix = await page.matrix(passage, best.model, best.head, true);
  const {queryUnits, keyUnits} = matrix;
  const isSelf = queryUnits === keyUnits;
  const chosen = focus.queries ? new Set(focus.queries[passage]) : null;
  const isOther = query => (focus.kind === "exchanged" ? words.has(query) : !isSelf || !words.has(query));
  const isRow = query => (chosen ? chosen.has(query) : !queryUnits.special[query] && isOther(query));
  const rows = matrix.visible.map((visible, query) => Number(visible && isRow(query)));
  const shares = focusOf(matrix, words, focus.kind, isSelf, chosen);
  const formats = {percent: formatPercent, atLeast: formatPercentAtLeast};
  const note = shares && otherWordNote(shares, keyUnits, page.heads[best.head].name, formats);
  return {
    note: note && page.passages.length > 1 ? `On this text: ${note}` : note,
    units: keyUnits,
    weights: receivedAttention(matrix, rows),
    underlined: words,
    around: [...words][0],
  };
}

/** Return a bar from 0 to 1 with the share, and a line at the share of uniform attention. */
function meter({share, uniform}) {
  const bar = element(
    "span",
    {class: "meter", "aria-hidden": "true"},
    element("span", {class: "meter-value"}),
    element("span", {class: "meter-mark"}),
  );
  bar.style.setProperty("--part", share.toFixed(3));
  bar.style.setProperty("--mark", uniform.toFixed(3));
  return bar;
}
