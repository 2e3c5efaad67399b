/** Patches: rectangles of pictures that tokens stand for, [picture, left, top, width, height] in fractions. */
import {element} from "./dom.js";

/** Largest number of pictures that are next to each other; more of them scroll sideways. */
const MOST_IN_A_ROW = 4;

/**
 * Return the rectangles in which the patches of a side are shown. Patches that overlap, as receptive fields do, are cut
 * halfway to the centres of the patches next to them, so that each point of a picture has the colour of one patch.
 */
export function shownPatches({pictures, patches}) {
  const shown = patches.slice();
  pictures.forEach((_, picture) => {
    const tokens = [...patches.keys()].filter(token => patches[token]?.[0] === picture);
    if (tokens.reduce((area, token) => area + patches[token][3] * patches[token][4], 0) <= 1.001) return;
    const columns = centresOf(tokens.map(token => patches[token]), 1);
    const rows = centresOf(tokens.map(token => patches[token]), 2);
    for (const token of tokens) {
      const [left, width] = cut(patches[token], columns, 1);
      const [top, height] = cut(patches[token], rows, 2);
      shown[token] = [picture, left, top, width, height];
    }
  });
  return shown;
}

/** Return the different centres of patches along an axis, 1 for columns and 2 for rows, in ascending order. */
function centresOf(patches, axis) {
  const all = patches.map(patch => centreOf(patch, axis)).sort((a, b) => a - b);
  return all.filter((centre, place) => !place || centre - all[place - 1] > 1e-6);
}

function centreOf(patch, axis) {
  return patch[axis] + patch[axis + 2] / 2;
}

/** Return the start and the length of a patch along an axis, cut halfway to the centres before and after its own. */
function cut(patch, centres, axis) {
  const own = centreOf(patch, axis);
  const place = centres.findIndex(centre => Math.abs(centre - own) < 1e-6);
  const start = Math.max(patch[axis], place > 0 ? (centres[place - 1] + own) / 2 : 0);
  const stop = Math.min(patch[axis] + patch[axis + 2], place + 1 < centres.length ? (centres[place + 1] + own) / 2 : 1);
  return [start, stop - start];
}

/** Return the units whose patches have their centre in a rectangle {left, top, right, bottom} of a picture. */
export function unitsInside({patches}, picture, {left, top, right, bottom}) {
  return [...patches.keys()].filter(unit => {
    const patch = patches[unit];
    if (patch?.[0] !== picture) return false;
    const [x, y] = [centreOf(patch, 1), centreOf(patch, 2)];
    return x >= left && x <= right && y >= top && y <= bottom;
  });
}

/** Return the smallest rectangle {left, top, right, bottom} that contains the centres of two patches. */
export function rectangleBetween(one, other) {
  const [xs, ys] = [1, 2].map(axis => [centreOf(one, axis), centreOf(other, axis)]);
  return {left: Math.min(...xs), top: Math.min(...ys), right: Math.max(...xs), bottom: Math.max(...ys)};
}

/** Axis and direction of the arrow keys. */
const ARROWS = {ArrowLeft: [1, -1], ArrowRight: [1, 1], ArrowUp: [2, -1], ArrowDown: [2, 1]};

/**
 * Return the unit of the patch to which an arrow key moves from a patch, in the same picture: among those whose centres
 * lie in this direction, one of the same row or column, or the nearest to it. Return undefined at the edge.
 */
export function neighbourOf({patches}, unit, key) {
  const [axis, sign] = ARROWS[key] ?? [];
  const from = patches[unit];
  if (!axis || !from) return undefined;
  let best;
  let least = [Infinity, Infinity];
  patches.forEach((patch, other) => {
    if (patch?.[0] !== from[0]) return;
    const along = sign * (centreOf(patch, axis) - centreOf(from, axis));
    const aside = Math.abs(centreOf(patch, 3 - axis) - centreOf(from, 3 - axis));
    if (along < 1e-6 || aside > least[0] + 1e-6) return;
    if (aside < least[0] - 1e-6 || along < least[1]) [best, least] = [other, [aside, along]];
  });
  return best;
}

/** Set the place of a patch along an axis. Edges are whole pixels, so that there are no lines between patches. */
function placeAlong(node, names, start, length) {
  const percent = part => `${(100 * part).toFixed(4)}%`;
  const pixel = part => `round(${percent(part)}, 1px)`;
  const exact = [percent(start), percent(length)];
  const rounded = [pixel(start), `calc(${pixel(start + length)} - ${pixel(start)})`];
  // A browser that does not know round() keeps the exact place.
  for (const values of [exact, rounded]) names.forEach((name, at) => node.style.setProperty(name, values[at]));
}

/**
 * Return the pictures of a side with its patches, or null if it has none. `nodeOf` returns the element of the patch of a
 * unit, or null for patches that are left out. If `hasNames`, the names of the pictures are below them.
 */
export function pictureStrip({pictures, patches, noun}, nodeOf, hasNames = pictures.length > 1) {
  if (!pictures.length) return null;
  const frames = pictures.map(({source, width, height}) => {
    const frame = element("div", {class: "picture-frame"}, element("img", {src: source, alt: "", width, height}));
    frame.style.setProperty("aspect-ratio", `${width} / ${height}`);
    frame.style.setProperty("--ratio", width / height);
    return frame;
  });
  patches.forEach((patch, unit) => {
    const node = patch && nodeOf(unit);
    if (!node) return;
    node.classList.add("patch");
    const [picture, left, top, width, height] = patch;
    placeAlong(node, ["left", "width"], left, width);
    placeAlong(node, ["top", "height"], top, height);
    frames[picture].append(node);
  });
  const strip = element(
    "div",
    {class: `strip${noun === "patch" ? "" : " mixed"}${frames.length > MOST_IN_A_ROW ? " scrolled" : ""}`},
    ...frames.map((frame, place) =>
      element("div", {class: "picture"}, frame, hasNames ? element("span", {class: "soft"}, pictures[place].name) : null),
    ),
  );
  strip.style.setProperty("--count", Math.min(frames.length, MOST_IN_A_ROW));
  return strip;
}
