/** Shares of a head's attention on the parts of what it reads: pictures, words, generated words, and attention sinks. */
import {element, formatPercent, formatPercentAtLeast} from "./dom.js";
import {receivedAttention} from "./attention.js";
import {shortened} from "./words.js";

/** Number of parts that are in one column. */
const MOST_IN_A_COLUMN = 8;

/** Why the shares state attention on sinks separately. */
const SINKS =
  "Attention on the first token and on special tokens is mostly a default of a head and not attention on content " +
  "(attention sinks, Xiao et al. 2023), so averages that include it mislead.";

/**
 * Return the mean shares of the attention of rows, [{name, share, isSink}], in the order of the text, sinks last, and without
 * parts that get no attention, as those that the rows do not see. The parts are disjoint and cover all keys; "not stored" is attention on keys that the page does not list.
 *
 * @param matrix matrix of a head
 * @param rows flags of the rows that count
 */
export function attentionShares(matrix, rows) {
  const {keyUnits} = matrix;
  const parts = new Map();
  const add = (name, share, isSink = false) => {
    if (!parts.has(name)) parts.set(name, {name, share: 0, isSink});
    parts.get(name).share += share;
  };
  const first = `first token, ${shortened(keyUnits.labels[0] ?? "", 16)}`;
  const words = keyUnits.generated.includes(1) ? "words of the prompt" : "words";
  receivedAttention(matrix, rows).forEach((share, key) => {
    const picture = keyUnits.pictures[keyUnits.patches[key]?.[0]];
    if (key === 0) add(first, share, true);
    else if (keyUnits.special[key]) add("special tokens", share, true);
    else add(picture ? picture.name : keyUnits.generated[key] ? "generated words" : words, share);
  });
  if (!matrix.exact) {
    const counted = matrix.rest.filter((_, query) => rows[query]);
    add("not stored", counted.reduce((sum, rest) => sum + rest, 0) / Math.max(counted.length, 1));
  }
  return [...parts.values()].filter(({share}) => share > 0).sort((a, b) => a.isSink - b.isSink);
}

/** Return true if the parts of a matrix differ in kind: words and patches, or a prompt and what was generated from it. */
function hasParts({queryUnits, keyUnits}) {
  return keyUnits.noun === "word or patch" || queryUnits.generated.includes(1) || keyUnits.generated.includes(1);
}

/**
 * Fill an element with the shares of the attention of the active word, or of all rows that are shown: a list of bars, and a
 * sentence about attention sinks. It is hidden if a key is active.
 */
export function fillShares(root, matrix, active, {rows}) {
  root.hidden = Boolean(matrix.signed) || active?.axis === "key" || !hasParts(matrix);
  if (root.hidden) return;
  const counted = active ? rows.map((_, query) => Number(query === active.unit)) : rows;
  const percent = matrix.exact ? formatPercent : formatPercentAtLeast;
  const items = attentionShares(matrix, counted).map(({name, share, isSink}) => {
    const isBound = !matrix.exact && name !== "not stored";
    const item = element(
      "li",
      {class: isSink ? "sink" : null},
      element("bdi", {class: "bar-name"}, name),
      element("span", {class: "bar"}),
      element("span", {class: "number"}, isBound ? `≥ ${percent(share)}` : formatPercent(share)),
    );
    item.style.setProperty("--part", Math.min(share, 1).toFixed(4));
    return item;
  });
  root.replaceChildren(
    element("h3", {}, "Shares of this attention"),
    element("ol", {class: `bars${items.length > MOST_IN_A_COLUMN ? " many" : ""}`}, ...items),
    element("p", {class: "soft"}, SINKS),
  );
}
