/** Matrix of a head on a canvas that can be zoomed and moved. */
import {choiceButtons, element, formatAtMost, formatListed, formatNumber, pressChoice} from "./dom.js";
import {mixed, propertyColour, roleColour} from "./colours.js";
import {isVisible, unlistedBound, weightAt} from "./attention.js";
import {cellAt, fittedView, matrixGrid, pannedView, scalePart, tileAverage, zoomedView} from "./matrix.js";
import {drawScale} from "./thumbnail.js";
import {unitName} from "./words.js";
import {LEFT_MARGIN, RIGHT_MARGIN, TOP_MARGIN, paintMatrix} from "./matrixpaint.js";
import {addGestures} from "./gestures.js";
import {unitsShown} from "./lines.js";

/**
 * Return a view of a matrix, {root, show(...), draw(), paint(canvas, ...)}.
 *
 * @param app the page's context
 * @param options {title, over({query, key} or null)}
 */
export function createMatrixView(app, {title, over}) {
  const canvas = element("canvas", {role: "img", "aria-label": title});
  const tip = element("div", {class: "tip", "aria-hidden": "true"});
  const scale = element("canvas", {class: "scale", "aria-hidden": "true"});
  const top = element("span", {});
  const plot = element(
    "div",
    {
      class: "matrix-plot",
      tabindex: 0,
      role: "group",
      "aria-label": "Matrix: + and − zoom, arrow keys move, 0 shows everything",
    },
    canvas,
    tip,
  );
  const scales = choiceButtons(
    "Scale",
    [
      ["root", "square-root scale"],
      ["linear", "linear scale"],
    ],
    app.state.get("scale"),
    value => app.state.set({scale: value}),
  );
  const zoomButton = (text, label, factor) =>
    element("button", {type: "button", "aria-label": label, title: label, click: () => zoom(factor)}, text);
  const root = element(
    "div",
    {class: "matrix"},
    plot,
    element(
      "div",
      {class: "matrix-tools"},
      zoomButton("+", "Zoom in", 1.6),
      zoomButton("−", "Zoom out", 1 / 1.6),
      element("button", {type: "button", click: reset}, "Show all"),
      scales,
      element("span", {class: "legend-scale"}, "0", scale, top),
    ),
  );
  let content = null;
  let view = null;
  let bounds = null;
  let active = null;
  let pending = 0;

  function show(next) {
    const isNew =
      content?.matrix !== next.matrix ||
      content?.grid.rows.length !== next.rows.length ||
      content?.grid.columns.length !== next.columns.length;
    content = {...next, grid: matrixGrid(next.matrix, next.rows, next.columns, next.tiles)};
    if (isNew) view = null;
    root.hidden = !next.rows.length || !next.columns.length;
    draw();
  }

  function measure() {
    const width = Math.max(plot.clientWidth - LEFT_MARGIN - RIGHT_MARGIN, 60);
    const {rows, columns} = content.grid;
    const height = Math.min(Math.max((width * rows.length) / Math.max(columns.length, 1), 60), width);
    bounds = {rows: rows.length, columns: columns.length, width, height};
    view ??= fittedView(bounds);
    view = zoomedView(view, bounds, 0, 0, 1);
    plot.classList.toggle("zoomed", view.cellX > (width / columns.length) * 1.01);
  }

  function draw() {
    if (!content || !plot.clientWidth || !content.grid.rows.length || !content.grid.columns.length) return;
    measure();
    paintMatrix(canvas, content, {
      view,
      bounds,
      ratio: Math.max(window.devicePixelRatio, 1),
      scale: app.state.get("scale"),
      active,
    });
    const ground = propertyColour("--panel");
    const colour = roleColour(content.role);
    drawScale(scale, part => mixed(ground, colour, scalePart(part, 1, app.state.get("scale"))));
    top.textContent = formatNumber(content.largest);
  }

  function redraw() {
    if (!pending)
      pending = requestAnimationFrame(() => {
        pending = 0;
        draw();
      });
  }

  function zoom(factor, x = bounds.width / 2, y = bounds.height / 2) {
    view = zoomedView(view, bounds, x, y, factor);
    redraw();
  }

  function reset() {
    view = null;
    redraw();
  }

  function pan(dx, dy) {
    view = pannedView(view, bounds, dx, dy);
    redraw();
  }

  const place = event => {
    const box = plot.getBoundingClientRect();
    return {x: event.clientX - box.left - LEFT_MARGIN, y: event.clientY - box.top - TOP_MARGIN};
  };
  addGestures(plot, {
    place,
    zoom,
    pan,
    reset,
    hover: event => {
      const {x, y} = event ? place(event) : {x: -1, y: -1};
      const cell = event && bounds && x >= 0 && y >= 0 ? cellAt(view, bounds, x, y) : null;
      const pair = cell && {query: content.grid.rows[cell.row], key: content.grid.columns[cell.column]};
      tip.textContent = pair ? cellText(content.grid, pair.query, pair.key) : "";
      if (pair) {
        tip.classList.toggle("left", x > bounds.width / 2);
        tip.style.setProperty("--x", `${x + LEFT_MARGIN}px`);
        tip.style.setProperty("--y", `${y + TOP_MARGIN}px`);
      }
      over(pair);
    },
  });
  new ResizeObserver(redraw).observe(plot);

  return {
    root,
    show,
    redraw,
    setActive: next => {
      active = next;
      redraw();
    },
    setScale: value => {
      pressChoice(scales, value);
      redraw();
    },
    /** Paint the whole matrix, with labels, on a new canvas. */
    picture(size) {
      const target = element("canvas");
      const {rows, columns} = content.grid;
      const all = {
        rows: rows.length,
        columns: columns.length,
        width: size,
        height: Math.max((size * rows.length) / columns.length, 60),
      };
      paintMatrix(target, content, {
        view: fittedView(all),
        bounds: all,
        ratio: 2,
        scale: app.state.get("scale"),
        active: null,
      });
      return target;
    },
  };
}

/** Return the weight of a cell as text; for a weight that is not listed, what is known about it. */
export function cellText(grid, query, key) {
  const {matrix, tiles} = grid;
  const names = `${unitName(matrix.queryUnits, query)} → ${unitName(matrix.keyUnits, key)}`;
  const weight = weightAt(matrix, query, key);
  if (weight !== null) return `${names}: ${matrix.exact ? "" : "at least "}${formatListed(matrix, weight)}`;
  if (!isVisible(matrix, query, key)) return `${names}: not visible`;
  const average = tiles ? `, average of its tile ${formatNumber(tileAverage(grid, query, key))}` : "";
  return `${names}: at most ${formatAtMost(unlistedBound(matrix, query, key))}${average}`;
}

/** Return the units that the matrix shows: {rows, columns}. */
export function matrixUnits(matrix, {rows, hiddenQueries, hiddenKeys}, onlyShownRows) {
  const queries = unitsShown(matrix.queryUnits, hiddenQueries);
  return {
    rows: onlyShownRows ? queries.filter(query => rows[query]) : queries,
    columns: unitsShown(matrix.keyUnits, hiddenKeys),
  };
}
