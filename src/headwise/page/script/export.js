/** Files and texts of the chosen head: matrix, curves and pictures as SVG and PNG, weights as text. */
import {ROUNDED_DOWN, byId, element, svgElement} from "./dom.js";
import {cssColour, propertyColour} from "./colours.js";
import {rowOf} from "./attention.js";
import {SCALE_HEIGHT, TITLE_HEIGHT, svgTitle} from "./caption.js";
import {lineStyle} from "./lines.js";
import {matrixSvg} from "./matrixsvg.js";
import {overlaySvg} from "./overlaysvg.js";
import {pinnedUnit} from "./meanattention.js";
import {strongestLinks} from "./strongest.js";
import {plainName} from "./words.js";

/**
 * Return buttons that save or copy what `view()` shows, {root, update()}. `update` hides those for which it shows nothing.
 */
export function exportButtons(app, view) {
  const name = () => `head-${app.page.heads[app.head()].name.replace(/[^\w.]+/g, "-")}`;
  const save = (text, action) =>
    element(
      "button",
      {
        type: "button",
        click: () => {
          if (view().isDrawn()) action();
        },
      },
      text,
    );
  const saveSvg = (kind, svg, asPng) => {
    if (asPng) pngOfSvg(svg, blob => saveBlob(`${name()}-${kind}.png`, blob));
    else saveText(`${name()}-${kind}.svg`, svgText(svg), "image/svg+xml");
  };
  const saveButtons = (label, makeSvg) =>
    ["PNG", "SVG"].map(type => save(`${label} ${type}`, () => saveSvg(label.toLowerCase(), makeSvg(), type === "PNG")));
  const matrix = () => matrixSvg(view().matrixView.saved(pictureTitle(app)));
  const curves = saveButtons("Curves", () => withCaption(view().picture(), pictureTitle(app)));
  const overlay = saveButtons("Picture", () =>
    overlaySvg(view().overlay(), pictureTitle(app), Math.min(app.state.get("opacity"), 100) / 100),
  );
  const links = save("Copy links", () => copyText(app, linksText(view().current())));
  const root = element(
    "div",
    {class: "tools"},
    element("span", {class: "soft"}, "Save"),
    save("Matrix PNG", () =>
      view()
        .matrixView.picture(800, pictureTitle(app))
        .toBlob(blob => saveBlob(`${name()}-matrix.png`, blob)),
    ),
    save("Matrix SVG", () => saveSvg("matrix", matrix(), false)),
    ...curves,
    ...overlay,
    save("Copy weights", () => copyText(app, weightsText(app, view().current()))),
    links,
  );
  function update() {
    for (const button of curves) button.hidden = !view().picture();
    for (const button of overlay) button.hidden = !view().overlay();
    links.hidden = Boolean(view().current()?.matrix.signed);
  }
  return {root, update};
}

/** Return the title of a saved picture: the head and the model. */
function pictureTitle({page, state, head, model}) {
  const names = page.models.map((each, index) =>
    page.models.length === 2 ? `${"AB"[index]}: ${each.name}` : each.name,
  );
  const title =
    state.get("model") === "difference" && names.length === 2 ? `B − A (${names.join(", ")})` : names[model()];
  return `Head ${page.heads[head()].name} · ${title}`;
}

/** Return the weights of the pinned word, or of all words, as lines of query, key and weight. */
export function weightsText({state}, {matrix, shown}) {
  const pin = pinnedUnit(state.get("pin"), matrix.queryUnits, matrix.keyUnits);
  const queries = pin?.axis === "query" ? [pin.unit] : [...shown.rows.keys()].filter(query => shown.rows[query]);
  const lines = queries.flatMap(query => {
    const {indices, weights} = rowOf(matrix, query);
    return Array.from(indices, (key, place) => copiedLine(matrix, query, key, weights[place]));
  });
  return [...copiedHeading(matrix), ...lines].join("\n");
}

/** Return the first lines of copied weights. */
function copiedHeading({exact, signed}) {
  const heading = `query\tkey\t${signed ? "weight in B minus weight in A" : "weight"}`;
  return [...(exact ? [] : [`# ${ROUNDED_DOWN} Smaller weights are not listed.`]), heading];
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
  return [plainName(matrix.queryUnits, query), plainName(matrix.keyUnits, key), copiedWeight(matrix, weight)].join(
    "\t",
  );
}

/** Weights whose lines are explained in a saved picture. */
const EXPLAINED_WEIGHTS = [0.04, 0.5, 1];

/** Return a copy of a picture of curves with the background of the page, a title, and an explanation of the lines. */
function withCaption(svg, title) {
  const copy = svg.cloneNode(true);
  copy.querySelectorAll("path").forEach(path => path.removeAttribute("class"));
  const {width, height} = svg.viewBox.baseVal;
  const all = TITLE_HEIGHT + height + SCALE_HEIGHT;
  const y = all - SCALE_HEIGHT / 2;
  const stroke = svg.querySelector("path")?.getAttribute("stroke") ?? "none";
  const fill = cssColour(propertyColour("--ink"));
  const explained = EXPLAINED_WEIGHTS.flatMap((weight, place) => [
    svgElement("path", {d: `M${70 + 110 * place} ${y}h40`, stroke, ...lineStyle(weight)}),
    svgElement("text", {x: 118 + 110 * place, y: y + 4, "font-size": 12, fill}, String(weight)),
  ]);
  const body = svgElement("g", {transform: `translate(0 ${TITLE_HEIGHT})`}, ...copy.childNodes);
  copy.setAttribute("viewBox", `0 0 ${width} ${all}`);
  copy.setAttribute("height", all);
  copy.replaceChildren(
    svgElement("rect", {width: "100%", height: "100%", fill: cssColour(propertyColour("--panel"))}),
    svgTitle(title),
    body,
    svgElement("text", {x: 12, y: y + 4, "font-size": 12, fill}, "weight"),
    ...explained,
  );
  return copy;
}

function svgText(svg) {
  svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(svg);
}

function pngOfSvg(svg, done) {
  const image = new Image();
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  image.addEventListener("load", () => {
    const canvas = element("canvas", {width: 2 * width, height: 2 * height});
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    canvas.toBlob(done);
  });
  image.src = `data:image/svg+xml,${encodeURIComponent(svgText(svg))}`;
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
