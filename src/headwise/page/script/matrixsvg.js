/** Matrix of a head as an SVG picture. */
import {svgElement} from "./dom.js";
import {cssColour, propertyColour} from "./colours.js";
import {SCALE_HEIGHT, TITLE_HEIGHT, svgScale, svgTitle} from "./caption.js";
import {cellWeights} from "./matrix.js";
import {shortened} from "./words.js";

/** Number of cells up to which a matrix is saved as rectangles, with words. */
const MOST_RECTANGLES = 10000;

const SVG_CELL = 14;
const SVG_LEFT = 120;
const SVG_TOP = 100 + TITLE_HEIGHT;

/** Return a matrix as an SVG element: rectangles and words, or a picture if it is large. */
export function matrixSvg({grid, caption, colourOf, picture}) {
  const {matrix, rows, columns} = grid;
  if (rows.length * columns.length > MOST_RECTANGLES) {
    const canvas = picture();
    return svgElement(
      "svg",
      {viewBox: `0 0 ${canvas.width} ${canvas.height}`},
      svgElement("image", {href: canvas.toDataURL(), width: canvas.width, height: canvas.height}),
    );
  }
  const ink = cssColour(propertyColour("--ink"));
  const bottom = SVG_TOP + rows.length * SVG_CELL;
  const weightsOf = cellWeights(grid);
  const cells = rows.flatMap((_, row) =>
    [...weightsOf(row)].flatMap((weight, column) =>
      Number.isNaN(weight)
        ? []
        : svgElement("rect", {
            x: SVG_LEFT + column * SVG_CELL,
            y: SVG_TOP + row * SVG_CELL,
            width: SVG_CELL,
            height: SVG_CELL,
            fill: cssColour(colourOf(weight)),
          }),
    ),
  );
  const unseen = svgElement("rect", {
    x: SVG_LEFT,
    y: SVG_TOP,
    width: columns.length * SVG_CELL,
    height: rows.length * SVG_CELL,
    fill: cssColour(propertyColour("--unseen")),
  });
  return svgElement(
    "svg",
    {
      viewBox: `0 0 ${Math.max(SVG_LEFT + columns.length * SVG_CELL + 80, 380)} ${bottom + 8 + SCALE_HEIGHT}`,
      "font-family": "system-ui, sans-serif",
      "font-size": 11,
    },
    svgElement("rect", {width: "100%", height: "100%", fill: cssColour(propertyColour("--panel"))}),
    svgTitle(caption.title),
    unseen,
    ...cells,
    ...rows.map((query, row) =>
      svgElement(
        "text",
        {x: SVG_LEFT - 6, y: SVG_TOP + row * SVG_CELL + 11, "text-anchor": "end", fill: ink},
        shortened(matrix.queryUnits.labels[query], 18),
      ),
    ),
    ...columns.map((key, column) =>
      svgElement(
        "text",
        {transform: `translate(${SVG_LEFT + column * SVG_CELL + 9} ${SVG_TOP - 6}) rotate(-60)`, fill: ink},
        shortened(matrix.keyUnits.labels[key], 18),
      ),
    ),
    svgScale(bottom + 4, caption),
  );
}
