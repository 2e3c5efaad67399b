/** Picture of a head's attention as curves between two columns of words. */
import {svgElement} from "./dom.js";
import {cssColour, propertyColour} from "./colours.js";
import {rowOf} from "./attention.js";
import {shortened} from "./words.js";

/** Number of words up to which curves are drawn. */
export const MOST_LINE_WORDS = 60;

const STEP = 22;
const LEFT = 150;
const RIGHT = 310;
const WIDTH = 460;

/** Return the units that are not hidden. */
export function unitsShown(units, hidden) {
  return Array.from({length: units.count}, (_, unit) => unit).filter(unit => !hidden[unit]);
}

/**
 * Return curves from queries (left) to keys (right) as an SVG element, or null if there are too many words.
 *
 * Each row's strongest weight is drawn, and all weights of at least 0.04. The colours are attributes, so that the
 * picture can be saved.
 */
export function linesPicture(matrix, {rows, hiddenQueries, hiddenKeys}, colour, title) {
  const queries = unitsShown(matrix.queryUnits, hiddenQueries);
  const keys = unitsShown(matrix.keyUnits, hiddenKeys);
  if (!queries.length || !keys.length || queries.length > MOST_LINE_WORDS || keys.length > MOST_LINE_WORDS) return null;
  const queryPlace = new Map(queries.map((unit, place) => [unit, place]));
  const keyPlace = new Map(keys.map((unit, place) => [unit, place]));
  const height = Math.max(queries.length, keys.length) * STEP + 34;
  const y = place => place * STEP + STEP / 2 + 28;
  const ink = cssColour(propertyColour("--ink"));
  const soft = cssColour(propertyColour("--soft"));
  const curves = lineWeights(
    matrix,
    queries.filter(query => rows[query]),
    hiddenKeys,
  ).map(({query, key, weight}) => {
    const from = y(queryPlace.get(query));
    const to = y(keyPlace.get(key));
    return svgElement("path", {
      d: `M${LEFT + 6} ${from}C${LEFT + 70} ${from} ${RIGHT - 70} ${to} ${RIGHT - 6} ${to}`,
      fill: "none",
      stroke: colour,
      ...lineStyle(weight),
      "data-query": query,
      "data-key": key,
    });
  });
  const label = (units, axis, x, anchor) => (unit, place) =>
    svgElement(
      "text",
      {
        x,
        y: y(place) + 4.5,
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
function lineWeights(matrix, queries, hiddenKeys) {
  const links = [];
  for (const query of queries) {
    const {indices, weights} = rowOf(matrix, query);
    const row = [...indices.keys()].filter(place => !hiddenKeys[indices[place]]);
    const largest = Math.max(...row.map(place => weights[place]));
    for (const place of row) {
      if (weights[place] >= 0.04 || (weights[place] === largest && largest > 0))
        links.push({query, key: indices[place], weight: weights[place]});
    }
  }
  return links.sort((a, b) => a.weight - b.weight);
}

/** Show only the curves of the active word; all if there is none. */
export function highlightLines(svg, active) {
  for (const curve of svg.querySelectorAll("path")) {
    curve.classList.toggle("faded", Boolean(active) && Number(curve.dataset[active.axis]) !== active.unit);
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
