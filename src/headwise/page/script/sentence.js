/** One line of text whose words are coloured by the attention on them. */
import {element} from "./dom.js";
import {shortened} from "./words.js";

/** Number of words that a line shows. */
const LINE_WORDS = 120;

/**
 * Return a line of words. The strength of a word's colour is proportional to the attention on it. It is full at half of
 * the attention; in a long text, already at 6 times uniform attention.
 *
 * @param units words of the text
 * @param weights attention on each word
 * @param options {underlined: Set of words, least: smallest weight that is coloured, around: word that must be shown}
 */
export function sentenceLine(units, weights, {underlined = new Set(), least = 0, around = null} = {}) {
  const words = Array.from({length: units.count}, (_, unit) => unit).filter(unit => !units.special[unit]);
  const centre = words.indexOf(around ?? strongest(words, weights));
  const start =
    words.length > LINE_WORDS ? Math.min(Math.max(centre - LINE_WORDS / 2, 0), words.length - LINE_WORDS) : 0;
  const shown = words.slice(start, start + LINE_WORDS);
  const full = Math.min(0.5, 6 / Math.max(words.length, 1));
  const line = element("p", {class: "sentence"}, start ? "… " : null);
  for (const unit of shown) {
    const word = element(
      "bdi",
      {class: `word${underlined.has(unit) ? " underlined" : ""}`},
      shortened(units.labels[unit], 40),
    );
    if (weights[unit] > least) word.style.setProperty("--a", Math.min(weights[unit] / full, 1).toFixed(3));
    line.append(units.space[unit] && unit !== shown[0] ? " " : "", word);
  }
  if (start + LINE_WORDS < words.length) line.append(" …");
  return line;
}

function strongest(words, weights) {
  return words.reduce((best, unit) => (weights[unit] > weights[best] ? unit : best), words[0]);
}
