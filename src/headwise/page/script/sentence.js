/** One line of text and small pictures, whose words and patches are coloured by the attention on them. */
import {element} from "./dom.js";
import {pictureStrip} from "./patches.js";
import {tintStrength} from "./tint.js";
import {directionOf, nounOf, shortened} from "./words.js";

/** Number of words that a line shows. */
const LINE_WORDS = 120;

/**
 * Return a line of words, below small pictures if units are patches.
 *
 * @param units words of the text
 * @param weights attention on each word; words with NaN are left out, and patches with NaN have no colour
 * @param scales scales of words and of patches, see `scalesOf`
 * @param options {underlined: Set of words, least: weights below which words have no colour, around: word that must be
 *   shown}
 */
export function sentenceLine(units, weights, scales, options = {}) {
  const {underlined = new Set(), least = null, around = null} = options;
  const tinted = (unit, node) => {
    const strength = tintStrength(weights[unit], scales[nounOf(units, unit)]);
    if (Math.abs(weights[unit]) > (least?.[unit] ?? 0)) node.style.setProperty("--a", Math.abs(strength).toFixed(3));
    if (strength < 0) node.classList.add("lower");
    if (underlined.has(unit)) node.classList.add("underlined");
    return node;
  };
  const isKnown = unit => !Number.isNaN(weights[unit]);
  const strip = pictureStrip(units, unit => (isKnown(unit) ? tinted(unit, element("span", {class: "word"})) : null));
  const words = [...units.labels.keys()].filter(unit => !units.special[unit] && !units.patches[unit] && isKnown(unit));
  if (!words.length && strip) return strip;
  const strongest = words.reduce((best, unit) => (weights[unit] > weights[best] ? unit : best), words[0]);
  const centre = words.indexOf(words.includes(around) ? around : strongest);
  const start =
    words.length > LINE_WORDS ? Math.min(Math.max(centre - LINE_WORDS / 2, 0), words.length - LINE_WORDS) : 0;
  const shown = words.slice(start, start + LINE_WORDS);
  const direction = directionOf(shown.map(unit => units.labels[unit]));
  const line = element("p", {class: "sentence", dir: direction}, start ? "… " : null);
  for (const unit of shown) {
    const word = tinted(unit, element("span", {class: "word"}, shortened(units.labels[unit], 40)));
    line.append(units.space[unit] && unit !== shown[0] ? " " : "", word);
  }
  if (start + LINE_WORDS < words.length) line.append(" …");
  return strip ? element("div", {}, strip, line) : line;
}

/** Return the weights of the units that are not special tokens, {units, indices, weights}. */
export function contentWeights({units, weights}) {
  const indices = [...units.labels.keys()].filter(unit => !units.special[unit]);
  return {units, indices, weights: indices.map(unit => weights[unit])};
}
