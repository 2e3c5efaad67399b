/** One line of text, or one picture, whose words or patches are coloured by the attention on them. */
import {element} from "./dom.js";
import {tintStrengths} from "./tint.js";
import {directionOf, shortened} from "./words.js";

/** Number of words that a line shows. */
const LINE_WORDS = 120;

/**
 * Return a line of words, or a picture if the units are patches.
 *
 * @param units words of the text
 * @param weights attention on each word
 * @param scale {largest, strength}: weight of the strongest colour, and its strength
 * @param options {underlined: Set of words, least: weights below which words have no colour, around: word that must be
 *   shown, image: the image of which the units are patches}
 */
export function sentenceLine(units, weights, scale, options = {}) {
  const {underlined = new Set(), least = null, around = null, image = null} = options;
  const strengths = tintStrengths(weights, scale);
  const tinted = (unit, node) => {
    if (weights[unit] > (least?.[unit] ?? 0)) node.style.setProperty("--a", strengths[unit].toFixed(3));
    if (underlined.has(unit)) node.classList.add("underlined");
    return node;
  };
  if (image) return pictureLine(units, image, tinted);
  const words = wordsOf(units);
  const centre = words.indexOf(around ?? strongest(words, weights));
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
  return line;
}

/** Return the largest weight of a word that is not special. */
export function largestWordWeight(units, weights) {
  return wordsOf(units).reduce((largest, unit) => Math.max(largest, weights[unit]), 0);
}

function wordsOf(units) {
  return Array.from({length: units.count}, (_, unit) => unit).filter(unit => !units.special[unit]);
}

function strongest(words, weights) {
  return words.reduce((best, unit) => (weights[unit] > weights[best] ? unit : best), words[0]);
}

/** Return a small picture with its patches as rectangles. */
function pictureLine(units, image, tinted) {
  const frame = element("div", {class: "picture-frame"}, element("img", {src: image.source, alt: ""}));
  frame.style.setProperty("aspect-ratio", `${image.width} / ${image.height}`);
  for (const unit of wordsOf(units)) {
    const box = image.boxes[units.first[unit]];
    if (!box) continue;
    const patch = tinted(unit, element("span", {class: "word patch"}));
    ["left", "top", "width", "height"].forEach((name, place) => patch.style.setProperty(name, `${100 * box[place]}%`));
    frame.append(patch);
  }
  return element("div", {class: "picture shows-image"}, frame);
}
