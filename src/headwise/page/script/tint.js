/** Colour of words and patches by attention weights, and the scale that states what the colours mean. */
import {element, formatSigned, formatWeight} from "./dom.js";
import {visibleKeys} from "./decode.js";

/** Smallest strength of the largest weight that is shown, so that it can be seen. */
const LEAST_STRENGTH = 0.25;

/** Multiple of uniform attention from which the largest weight has the full colour. */
const FULL_COLOUR = 4;

/** Return the strength of the colour of the largest weight that is shown. Uniform attention must not look like a focus. */
export function strengthOfLargest(largest, uniform) {
  return Math.min(1, Math.max(LEAST_STRENGTH, largest, largest / uniform / FULL_COLOUR));
}

/**
 * Return the strength of each weight's colour, from 0 to 1; differences keep their sign. It is proportional to the square
 * root of the weight.
 *
 * @param weights weights or differences of weights
 * @param scale {largest, strength}: largest weight that is shown, and the strength of its colour
 */
export function tintStrengths(weights, {largest, strength}) {
  return Array.from(
    weights,
    weight => Math.sign(weight) * strength * Math.sqrt(Math.min(Math.abs(weight) / Math.max(largest, 1e-9), 1)),
  );
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

/** Return the scale of colours from 0 to the largest weight; of differences, from its negative. */
export function tintScale({largest, strength}, label, isSigned = false) {
  const bar = element("span", {class: `tint-scale${isSigned ? " signed" : ""}`, "aria-hidden": "true"});
  bar.style.setProperty("--strength", strength.toFixed(3));
  const ends = isSigned ? [formatSigned(-largest), formatSigned(largest)] : ["0", formatWeight(largest)];
  const [low, high] = ends.map(text => element("span", {}, text));
  return element("span", {class: "legend-scale"}, element("span", {}, label), low, bar, high);
}
