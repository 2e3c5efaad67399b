/** Matrix of a head on a canvas that can be zoomed and moved. */
import {choiceButtons, element, formatNumber, pressChoice} from "./dom.js";
import {canvasWithCaption} from "./caption.js";
import {cellText, tilesNote} from "./celltext.js";
import {cellAt, fittedView, isFitted, matrixGrid, pannedView, scalePart, zoomedView} from "./matrix.js";
import {drawScale} from "./thumbnail.js";
import {LEFT_MARGIN, RIGHT_MARGIN, TOP_MARGIN, matrixColours, paintMatrix} from "./matrixpaint.js";
import {addGestures} from "./gestures.js";
import {unitsShown} from "./lines.js";

/**
 * Return a view of a matrix, {root, show(...), draw(), paint(canvas, ...)}.
 *
 * @param app the page's context
 * @param options {title, name, over({query, key} or null)}; `name` is "A", "B" or "B − A" if two models are compared
 */
export function createMatrixView(app, {title, name, over}) {
  const canvas = element("canvas", {role: "img", "aria-label": title});
  const tip = element("div", {class: "tip", "aria-hidden": "true"});
  const scale = element("canvas", {class: "scale", "aria-hidden": "true"});
  const [low, high] = [element("span", {}), element("span", {})];
  const note = element("p", {class: "soft matrix-note"});
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
      element("span", {class: "legend-scale"}, low, scale, high),
    ),
    note,
  );
  let content = null;
  let view = null;
  let bounds = null;
  let active = null;
  let pointed = null;
  let pending = 0;
  const cache = {};

  function show(next) {
    const isNew =
      content?.matrix !== next.matrix ||
      content?.grid.rows.length !== next.rows.length ||
      content?.grid.columns.length !== next.columns.length;
    content = {...next, grid: matrixGrid(next.matrix, next.rows, next.columns, next.tiles)};
    if (isNew) view = null;
    pointed = null;
    tip.textContent = "";
    note.textContent = tilesNote(content.grid);
    root.hidden = !next.rows.length || !next.columns.length;
    draw();
  }

  function measure() {
    const width = Math.max(plot.clientWidth - LEFT_MARGIN - RIGHT_MARGIN, 60);
    const {rows, columns} = content.grid;
    const height = Math.min(Math.max((width * rows.length) / Math.max(columns.length, 1), 60), width);
    const isZoomed = view && bounds && !isFitted(view, bounds);
    bounds = {rows: rows.length, columns: columns.length, width, height};
    view = isZoomed ? zoomedView(view, bounds, 0, 0, 1) : fittedView(bounds);
    plot.classList.toggle("zoomed", !isFitted(view, bounds));
  }

  function draw() {
    if (!content || !plot.clientWidth || !content.grid.rows.length || !content.grid.columns.length) return;
    measure();
    const ratio = Math.max(window.devicePixelRatio, 1);
    paintMatrix(canvas, content, {view, bounds, ratio, scale: app.state.get("scale"), active, pointed}, cache);
    const caption = captionOf("");
    drawScale(scale, caption.colourAt);
    low.textContent = caption.low;
    high.textContent = caption.high;
  }

  /** Return the title and the colour scale of the matrix, for a saved picture. */
  function captionOf(text) {
    const colourAt = matrixColours(content);
    const {signed} = content.matrix;
    return {
      title: text,
      low: signed ? `−${formatNumber(content.largest)}` : "0",
      high: `${signed ? "+" : ""}${formatNumber(content.largest)}`,
      colourAt: part => colourAt(scalePart(signed ? 2 * part - 1 : part, 1, app.state.get("scale"))),
    };
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
    if (bounds) view = fittedView(bounds);
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
      const cell = event && view && x >= 0 && y >= 0 ? cellAt(view, bounds, x, y) : null;
      const pair = cell && {query: content.grid.rows[cell.row], key: content.grid.columns[cell.column]};
      tip.textContent = pair ? cellText(content.grid, pair.query, pair.key, name) : "";
      if (pair?.query !== pointed?.query || pair?.key !== pointed?.key) {
        pointed = pair;
        redraw();
      }
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
    /** Return what a saved picture of the matrix shows: {grid, caption, colourOf(weight), picture()}. */
    saved(text) {
      const colourAt = matrixColours(content);
      return {
        grid: content.grid,
        caption: captionOf(text),
        colourOf: weight => colourAt(scalePart(weight, content.largest, app.state.get("scale"))),
        picture: () => this.picture(800, text),
      };
    },
    /** Paint the whole matrix, with labels, a title and its scale, on a new canvas. */
    picture(size, text) {
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
      return canvasWithCaption(target, 2, captionOf(text));
    },
  };
}

/** Return the units that the matrix shows: {rows, columns}. */
export function matrixUnits(matrix, {rows, hiddenQueries, hiddenKeys}, onlyShownRows) {
  const queries = unitsShown(matrix.queryUnits, hiddenQueries);
  return {
    rows: onlyShownRows ? queries.filter(query => rows[query]) : queries,
    columns: unitsShown(matrix.keyUnits, hiddenKeys),
  };
}
