/** Colour of words and patches by attention weights, and the scale that states what the colours mean. */
import {element, formatSigned, formatWeight} from "./dom.js";
import {visibleKeys} from "./decode.js";
import {nounOf} from "./words.js";

/** Smallest strength of the largest weight that is shown, so that it can be seen. */
const LEAST_STRENGTH = 0.25;

/** Multiple of uniform attention from which the largest weight has the full colour. */
const FULL_COLOUR = 4;

/** Return the strength of the colour of the largest weight that is shown. Uniform attention must not look like a focus. */
export function strengthOfLargest(largest, uniform) {
  return Math.min(1, Math.max(LEAST_STRENGTH, largest, largest / uniform / FULL_COLOUR));
}

/**
 * Return the scales of the colours of words and of patches, {word, patch}. Each is {largest, strength}: the largest weight
 * that is shown, and the strength of its colour. A text with both has two scales, because its words would hide the weights
 * of its patches, which are many and small. Otherwise there is one scale.
 *
 * @param selections [{units, indices, weights}]: what is shown with these scales
 * @param uniform weight of a unit under uniform attention
 */
export function scalesOf(selections, uniform) {
  const largest = {word: 0, patch: 0};
  for (const {units, indices, weights} of selections) {
    indices.forEach((unit, place) => {
      const noun = nounOf(units, unit);
      largest[noun] = Math.max(largest[noun], Math.abs(weights[place]));
    });
  }
  if (!selections.some(({units}) => units.noun === "word or patch"))
    largest.word = largest.patch = Math.max(largest.word, largest.patch);
  const scale = size => ({largest: size, strength: strengthOfLargest(size, uniform)});
  return {word: scale(largest.word), patch: scale(largest.patch)};
}

/**
 * Return the strength of the colour of a weight, from 0 to 1; a difference of weights keeps its sign. It is proportional to
 * the square root of the weight.
 */
export function tintStrength(weight, {largest, strength}) {
  return Math.sign(weight) * strength * Math.sqrt(Math.min(Math.abs(weight) / Math.max(largest, 1e-9), 1));
}

/** Return the mean weight that the given queries would have on a visible key under uniform attention. */
export function uniformWeight({queryUnits, keyUnits, visibility}, queries) {
  const tokens = keyUnits.of.length / keyUnits.count;
  let sum = 0;
  let count = 0;
  for (const query of queries) {
    const visible = visibleKeys(visibility, queryUnits.first[query + 1] - 1);
    if (!visible) continue;
    sum += Math.min(tokens / visible, 1);
    count += 1;
  }
  return count ? sum / count : 1;
}

/** Return the strengths of the colours of the weights of units. */
export function tintStrengths({units, indices, weights}, scales) {
  return indices.map((unit, place) => tintStrength(weights[place], scales[nounOf(units, unit)]));
}

/** Return the scales of colours of the words and the patches of a text as elements, for those that it has. */
export function tintLegend(scales, {noun}, label, isSigned = false) {
  const legend = (name, isVeil, suffix = "") =>
    scales[name].largest > 0 ? tintScale(scales[name], label + suffix, isSigned, isVeil) : "";
  if (noun !== "word or patch") return [legend("word", noun === "patch")];
  return [legend("word", false, ", words"), " ", legend("patch", true, ", patches")];
}

/** Return the scale of colours from 0 to the largest weight; of differences, from its negative. A veil is that of patches. */
function tintScale({largest, strength}, label, isSigned, isVeil) {
  const type = isSigned ? " signed" : isVeil ? " veil" : "";
  const bar = element("span", {class: `tint-scale${type}`, "aria-hidden": "true"});
  bar.style.setProperty("--strength", strength.toFixed(3));
  const ends = isSigned ? [formatSigned(-largest), formatSigned(largest)] : ["0", formatWeight(largest)];
  const [low, high] = ends.map(text => element("span", {}, text));
  return element("span", {class: "legend-scale"}, element("span", {}, label), low, bar, high);
}
