/** Picture of a head's attention as curves between two columns of words. */
import {svgElement} from "./dom.js";
import {cssColour, propertyColour} from "./colours.js";
import {columnOf, receivedAttention, rowOf} from "./attention.js";
import {shortened} from "./words.js";

/** Largest number of words in a column. */
export const MOST_LINE_WORDS = 60;

/** Smallest weight that is drawn, except the largest of each word. */
const LEAST_LINE = 0.04;

const STEP = 22;
const LEFT = 150;
const RIGHT = 310;
const WIDTH = 460;

/** Return the units that are not hidden. */
export function unitsShown(units, hidden) {
  return Array.from({length: units.count}, (_, unit) => unit).filter(unit => !hidden[unit]);
}

/**
 * Return the words between which curves are drawn, {queries, keys, isPinned, isFew, window}, or null if all are hidden: all
 * words, or, if they are too many, the pinned word and the words with its largest weights, or the few rows that count and
 * the words to which they have curves, or else a window of words: {first, last, count, earlier, later}, the numbers of
 * its words, and the words at which the windows before and after it start.
 *
 * @param matrix matrix of a head
 * @param shown {rows, hiddenQueries, hiddenKeys}: flags of rows that count and of hidden words
 * @param pin {axis, unit} of the pinned word, or null
 * @param from word at which the window starts
 */
export function lineUnits(matrix, {rows, hiddenQueries, hiddenKeys}, pin, from) {
  const all = {queries: unitsShown(matrix.queryUnits, hiddenQueries), keys: unitsShown(matrix.keyUnits, hiddenKeys)};
  if (!all.queries.length || !all.keys.length) return null;
  if (Math.max(all.queries.length, all.keys.length) <= MOST_LINE_WORDS) return all;
  if (pin) {
    const isQuery = pin.axis === "query";
    const {indices, weights} = (isQuery ? rowOf : columnOf)(matrix, pin.unit);
    const isShown = unit => (isQuery ? !hiddenKeys[unit] : rows[unit]);
    const others = largestUnits(indices, weights, isShown);
    return {queries: isQuery ? [pin.unit] : others, keys: isQuery ? others : [pin.unit], isPinned: true};
  }
  const counted = all.queries.filter(query => rows[query]);
  if (counted.length && counted.length <= MOST_LINE_WORDS && counted.length < all.queries.length) {
    const drawn = new Set();
    for (const query of counted) {
      const {indices, weights} = rowOf(matrix, query);
      const isShown = key => !hiddenKeys[key];
      for (const key of largestUnits(indices, weights, isShown)) drawn.add(key);
    }
    const received = receivedAttention(matrix, rows);
    return {queries: counted, keys: largestUnits([...received.keys()], received, key => drawn.has(key), 0), isFew: true};
  }
  const startOf = units => {
    const place = units.findIndex(unit => unit >= from);
    return Math.max(Math.min(place < 0 ? Infinity : place, units.length - MOST_LINE_WORDS), 0);
  };
  const windowOf = units => units.slice(startOf(units), startOf(units) + MOST_LINE_WORDS);
  const units = all.queries.length > MOST_LINE_WORDS ? all.queries : all.keys;
  const start = startOf(units);
  const stop = start + MOST_LINE_WORDS;
  return {
    queries: windowOf(all.queries),
    keys: windowOf(all.keys),
    window: {
      first: start + 1,
      last: stop,
      count: units.length,
      earlier: start > 0 ? units[Math.max(start - MOST_LINE_WORDS, 0)] : null,
      later: units[stop] ?? null,
    },
  };
}

/** Return the units with the largest weights, at most as many as a column has, in the order of the text. */
function largestUnits(indices, weights, isShown, least = LEAST_LINE) {
  const places = [...indices.keys()].filter(place => isShown(indices[place]) && weights[place] > 0);
  places.sort((a, b) => weights[b] - weights[a]);
  const drawn = places.slice(0, MOST_LINE_WORDS).filter((place, rank) => !rank || weights[place] >= least);
  return drawn.map(place => indices[place]).sort((a, b) => a - b);
}

/**
 * Return curves from queries (left) to keys (right) as an SVG element.
 *
 * Each row's strongest weight on these keys is drawn, and all weights of at least 0.04. The colours are attributes, so that
 * the picture can be saved.
 */
export function linesPicture(matrix, rows, {queries, keys}, colour, title) {
  const queryPlace = new Map(queries.map((unit, place) => [unit, place]));
  const keyPlace = new Map(keys.map((unit, place) => [unit, place]));
  const most = Math.max(queries.length, keys.length);
  const height = most * STEP + 34;
  // A pinned word is opposite to the middle of the other words.
  const y = (place, count) => (place + (count === 1 ? (most - 1) / 2 : 0)) * STEP + STEP / 2 + 28;
  const ink = cssColour(propertyColour("--ink"));
  const soft = cssColour(propertyColour("--soft"));
  const curves = lineWeights(
    matrix,
    queries.filter(query => rows[query]),
    keyPlace,
  ).map(({query, key, weight}) => {
    const from = y(queryPlace.get(query), queries.length);
    const to = y(keyPlace.get(key), keys.length);
    return svgElement("path", {
      d: `M${LEFT + 6} ${from}C${LEFT + 70} ${from} ${RIGHT - 70} ${to} ${RIGHT - 6} ${to}`,
      fill: "none",
      stroke: colour,
      ...lineStyle(weight),
      "data-query": query,
      "data-key": key,
    });
  });
  const label = (units, axis, x, anchor) => (unit, place, column) =>
    svgElement(
      "text",
      {
        x,
        y: y(place, column.length) + 4.5,
        "text-anchor": anchor,
        fill: units.special[unit] ? soft : ink,
        [`data-${axis}`]: unit,
        class: "line-word",
      },
      shortened(units.labels[unit], 18),
    );
  const heading = (x, anchor, text) =>
    svgElement("text", {x, y: 14, "text-anchor": anchor, fill: soft, "font-size": 12}, text);
  return svgElement(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${height}`,
      width: WIDTH,
      height,
      role: "img",
      "aria-label": title,
      class: "lines",
      "font-family": "system-ui, sans-serif",
      "font-size": 13.5,
    },
    svgElement("title", {}, title),
    heading(LEFT, "end", "from"),
    heading(RIGHT, "start", "to"),
    ...curves,
    ...queries.map(label(matrix.queryUnits, "query", LEFT, "end")),
    ...keys.map(label(matrix.keyUnits, "key", RIGHT, "start")),
  );
}

/** Return the attributes of a line for a weight. */
export function lineStyle(weight) {
  return {
    "stroke-width": (0.8 + 3.2 * weight).toFixed(2),
    "stroke-opacity": (0.28 + 0.72 * Math.sqrt(weight)).toFixed(2),
  };
}

/** Return the links that are drawn, the weakest first, so that strong links are on top. */
function lineWeights(matrix, queries, shownKeys) {
  const links = [];
  for (const query of queries) {
    const {indices, weights} = rowOf(matrix, query);
    const row = [...indices.keys()].filter(place => shownKeys.has(indices[place]));
    const largest = Math.max(...row.map(place => weights[place]));
    for (const place of row) {
      if (weights[place] >= LEAST_LINE || (weights[place] === largest && largest > 0))
        links.push({query, key: indices[place], weight: weights[place]});
    }
  }
  return links.sort((a, b) => a.weight - b.weight);
}

/** Show only the curves of the active word; all if the picture does not have it. */
export function highlightLines(svg, active) {
  const isDrawn = active && svg.querySelector(`.line-word[data-${active.axis}="${active.unit}"]`);
  for (const curve of svg.querySelectorAll("path")) {
    curve.classList.toggle("faded", Boolean(isDrawn) && Number(curve.dataset[active.axis]) !== active.unit);
  }
  for (const word of svg.querySelectorAll(".line-word")) {
    word.classList.toggle("active", Boolean(active) && word.dataset[active.axis] === String(active.unit));
  }
}

/** Return a sentence that describes the curves for readers who do not see them. */
export function linesTitle(headName, matrix) {
  return (
    `Attention of head ${headName} as curves from each word to the words it attends to. ` +
    `The head has ${matrix.queryUnits.count} query words; the list of links has the strongest weights.`
  );
}
