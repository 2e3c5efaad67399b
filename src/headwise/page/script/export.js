/** Files and texts of the chosen head: matrix and curves as SVG and PNG, weights as text. */
import {ROUNDED_DOWN, byId, element, svgElement} from "./dom.js";
import {cssColour, mixed, propertyColour, roleColour} from "./colours.js";
import {rowOf} from "./attention.js";
import {scalePart} from "./matrix.js";
import {strongestLinks} from "./strongest.js";
import {plainName, shortened} from "./words.js";

/** Number of cells up to which a matrix is saved as rectangles, with words. */
const MOST_RECTANGLES = 10000;

/** Return buttons that save or copy what `view()` shows. */
export function exportButtons(app, view) {
  const name = () => `head-${app.page.heads[app.head()].name.replace(/[^\w.]+/g, "-")}`;
  const save = (text, action) =>
    element(
      "button",
      {
        type: "button",
        click: () => {
          if (view().current()) action();
        },
      },
      text,
    );
  const savePicture = (kind, asPng) => {
    const svg = view().picture();
    if (!svg) {
      app.announce("Curves are drawn for at most 60 words.");
      return;
    }
    if (asPng) pngOfSvg(svg, blob => saveBlob(`${name()}-${kind}.png`, blob));
    else saveText(`${name()}-${kind}.svg`, svgText(withGround(svg)), "image/svg+xml");
  };
  return element(
    "div",
    {class: "tools"},
    element("span", {class: "soft"}, "Save"),
    save("Matrix PNG", () =>
      view()
        .matrixView.picture(800)
        .toBlob(blob => saveBlob(`${name()}-matrix.png`, blob)),
    ),
    save("Matrix SVG", () => saveText(`${name()}-matrix.svg`, svgText(matrixSvg(app, view())), "image/svg+xml")),
    save("Curves PNG", () => savePicture("curves", true)),
    save("Curves SVG", () => savePicture("curves", false)),
    save("Copy weights", () => copyText(app, weightsText(app, view().current()))),
    save("Copy links", () => copyText(app, linksText(view().current()))),
  );
}

/** Return the weights of the pinned word, or of all words, as lines of query, key and weight. */
export function weightsText({state}, {matrix, shown}) {
  const pin = /^q(\d+)$/.exec(state.get("pin"));
  const queries = pin ? [Number(pin[1])] : [...shown.rows.keys()].filter(query => shown.rows[query]);
  const lines = queries.flatMap(query => {
    const {indices, weights} = rowOf(matrix, query);
    return Array.from(indices, (key, place) =>
      copiedLine(matrix, query, key, weights[place]),
    );
  });
  return [...copiedHeading(matrix), ...lines].join("\n");
}

/** Return the first lines of copied weights. */
function copiedHeading({exact}) {
  return [...(exact ? [] : [`# ${ROUNDED_DOWN} Smaller weights are not listed.`]), "query\tkey\tweight"];
}

/** Return a weight with four digits, or with three digits and rounded down if only the largest weights are stored. */
function copiedWeight({exact}, weight) {
  // Float32 numbers are up to 6e-8 below the decimal number that they stand for.
  return exact ? weight.toFixed(4) : (Math.floor(weight * 1000 + 1e-4) / 1000).toFixed(3);
}

/** Return the strongest links as lines of query, key and weight. */
export function linksText({matrix, shown}) {
  const {links} = strongestLinks(matrix, shown.rows, shown.hiddenKeys, 50);
  return [
    ...copiedHeading(matrix),
    ...links.flatMap(({query, key, weight, back}) => [
      copiedLine(matrix, query, key, weight),
      ...(back === null ? [] : [copiedLine(matrix, key, query, back)]),
    ]),
  ].join("\n");
}

function copiedLine(matrix, query, key, weight) {
  return [plainName(matrix.queryUnits, query), plainName(matrix.keyUnits, key), copiedWeight(matrix, weight)].join("\t");
}

/** Return the matrix as an SVG element: rectangles and words, or a picture if it is large. */
function matrixSvg(app, view) {
  const {matrix, shown, role} = view.current();
  const size = 14;
  const left = 120;
  const top = 100;
  const rows = [...shown.hiddenQueries.keys()].filter(unit => !shown.hiddenQueries[unit]);
  const columns = [...shown.hiddenKeys.keys()].filter(unit => !shown.hiddenKeys[unit]);
  const ground = propertyColour("--panel");
  const colour = roleColour(role);
  const ink = cssColour(propertyColour("--ink"));
  if (rows.length * columns.length > MOST_RECTANGLES) {
    const canvas = view.matrixView.picture(800);
    return svgElement(
      "svg",
      {viewBox: `0 0 ${canvas.width} ${canvas.height}`},
      svgElement("image", {href: canvas.toDataURL(), width: canvas.width, height: canvas.height}),
    );
  }
  const place = new Map(columns.map((unit, column) => [unit, column]));
  const largest = matrix.weight.reduce((a, b) => Math.max(a, b), 0) || 1;
  const svg = svgElement(
    "svg",
    {
      viewBox: `0 0 ${left + columns.length * size + 80} ${top + rows.length * size + 4}`,
      "font-family": "system-ui, sans-serif",
      "font-size": 11,
    },
    svgElement("rect", {width: "100%", height: "100%", fill: cssColour(ground)}),
  );
  rows.forEach((query, row) => {
    const {indices, weights} = rowOf(matrix, query);
    indices.forEach((key, entry) => {
      if (!place.has(key)) return;
      svg.append(
        svgElement("rect", {
          x: left + place.get(key) * size,
          y: top + row * size,
          width: size,
          height: size,
          fill: cssColour(mixed(ground, colour, scalePart(weights[entry], largest, app.state.get("scale")))),
        }),
      );
    });
    svg.append(
      svgElement(
        "text",
        {x: left - 6, y: top + row * size + 11, "text-anchor": "end", fill: ink},
        shortened(matrix.queryUnits.labels[query], 16),
      ),
    );
  });
  columns.forEach((key, column) =>
    svg.append(
      svgElement(
        "text",
        {transform: `translate(${left + column * size + 9} ${top - 6}) rotate(-60)`, fill: ink},
        shortened(matrix.keyUnits.labels[key], 16),
      ),
    ),
  );
  return svg;
}

/** Return a copy of an SVG element with the background of the page. */
function withGround(svg) {
  const copy = svg.cloneNode(true);
  copy.querySelectorAll("path").forEach(path => path.removeAttribute("class"));
  copy.prepend(svgElement("rect", {width: "100%", height: "100%", fill: cssColour(propertyColour("--panel"))}));
  return copy;
}

function svgText(svg) {
  svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(svg);
}

function pngOfSvg(svg, done) {
  const image = new Image();
  const {width, height} = svg.viewBox.baseVal;
  image.addEventListener("load", () => {
    const canvas = element("canvas", {width: 2 * width, height: 2 * height});
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    canvas.toBlob(done);
  });
  image.src = `data:image/svg+xml,${encodeURIComponent(svgText(withGround(svg)))}`;
}

function saveText(name, text, type) {
  if (isSandboxed()) showText(`Copy this text into a file called ${name}.`, text);
  else saveBlob(name, new Blob([text], {type}));
}

/** Save a file. A sandboxed frame may forbid downloads without an error, so it shows the picture instead. */
function saveBlob(name, blob) {
  if (isSandboxed()) {
    const reader = new FileReader();
    reader.addEventListener("load", () =>
      showInDialog(
        `Save this picture as ${name} with the context menu.`,
        element("img", {src: reader.result, alt: name}),
      ),
    );
    reader.readAsDataURL(blob);
    return;
  }
  const address = URL.createObjectURL(blob);
  const link = element("a", {href: address, download: name});
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function isSandboxed() {
  return window.parent !== window && window.origin === "null";
}

async function copyText(app, text) {
  try {
    await navigator.clipboard.writeText(text);
    app.announce("The text was copied.");
  } catch {
    showText("The browser does not allow copying. Select the text and copy it.", text);
  }
}

function showText(title, text) {
  const area = element("textarea", {rows: 12, readonly: true, "aria-label": "Text to copy"});
  area.value = text;
  showInDialog(title, area);
  area.select();
}

function showInDialog(title, content) {
  const dialog = byId("export-dialog");
  byId("export-content").replaceChildren(element("p", {}, title), content);
  dialog.showModal();
}
