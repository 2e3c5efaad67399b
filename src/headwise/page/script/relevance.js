/** Maps of relevance for a predicted token: pictures, their agreement with occlusion, and deletion and insertion curves. */
import {byId, element, formatNumber, svgElement} from "./dom.js";
import {seriesClass} from "./colours.js";
import {sentenceLine} from "./sentence.js";
import {quotedName} from "./words.js";

/** Size of a plot of curves, and the space for its numbers, in pixels. */
const PLOT = {width: 260, height: 130, left: 34, bottom: 18, top: 8, right: 8};

/** Curves of a map, and what changes along them. */
const CURVES = [
  {name: "deletion", axis: "patches removed"},
  {name: "insertion", axis: "patches shown"},
];

const NOTE =
  "Deletion removes the patches with the largest values first, insertion shows them first. If a map finds the patches " +
  "that the model uses, the probability falls fast in deletion (small area) and rises fast in insertion (large area). " +
  "The grey line is the mean over random orders.";

/** Return the relevance of each unit: the sum over its tokens, or NaN if none of them has a value. */
export function unitRelevance(units, values) {
  return Float64Array.from({length: units.count}, (_, unit) => {
    const known = values.subarray(units.first[unit], units.first[unit + 1]).filter(value => !Number.isNaN(value));
    return known.length ? known.reduce((sum, value) => sum + value, 0) : NaN;
  });
}

/** Return the area under a curve whose points are at equal distances from 0 to 1 (trapezoidal rule). */
export function areaUnder(curve) {
  const inner = curve.reduce((sum, value) => sum + value, 0) - (curve[0] + curve.at(-1)) / 2;
  return inner / Math.max(curve.length - 1, 1);
}

/** Return sentences about the agreement of a map with occlusion, {text, warning}; both are "" for occlusion itself. */
export function agreementText(agreement) {
  if (!agreement) return {text: "", warning: ""};
  if (agreement.includes(null)) return {text: "Agreement with occlusion: unknown", warning: ""};
  const [value, low, high] = agreement.map(number => number.toFixed(2).replace("-", "−"));
  return {
    text: `Agreement with occlusion: Spearman ${value} (${low} to ${high})`,
    warning: agreement[1] > 0 ? "" : "This map does not agree with occlusion.",
  };
}

/** Fill the panel with the maps of relevance of the pinned word. Return a function that is called when it changes. */
export function createRelevance(app) {
  const {page, state} = app;
  const root = byId("head-maps");
  let shown = "";

  return async (pin, querySide) => {
    const passage = app.passage();
    const maps = (page.passages[passage]?.maps ?? []).filter(map => map.targetSide === querySide);
    root.hidden = !maps.length;
    if (root.hidden) return;
    const units = page.units(passage, querySide, state.get("words"));
    const nameOf = unit => (units.special[unit] ? `at ${units.labels[unit]}` : `of ${quotedName(units, unit, 20)}`);
    const isOf = (map, unit) => units.of[map.target] === unit;
    const chosen = pin ? maps.filter(map => isOf(map, pin.unit)) : [];
    const key = `${passage} ${state.get("words")} ${chosen.length ? pin.unit : ""}`;
    if (key === shown) return;
    shown = key;
    const title = element("h3", {}, "Maps of relevance");
    if (!chosen.length) {
      const targets = [...new Set(maps.map(map => units.of[map.target]))];
      const buttons = targets.flatMap((unit, place) => [
        place ? ", " : " ",
        element(
          "button",
          {type: "button", class: "link", click: () => state.set({pin: `q${unit}`, direction: "from"})},
          nameOf(unit),
        ),
      ]);
      root.replaceChildren(title, element("p", {class: "soft"}, "For the prediction", ...buttons));
      return;
    }
    const all = await page.maps(passage);
    if (key !== shown) return;
    title.append(` for the prediction ${nameOf(pin.unit)}`);
    const selected = all.filter((_, place) => chosen.includes(page.passages[passage].maps[place]));
    const curves = CURVES.filter(({name}) => selected.some(map => map.curves[name]));
    root.replaceChildren(
      title,
      element("div", {class: "maps"}, ...selected.map((map, place) => mapCard(page, passage, map, state, place))),
      ...(curves.length
        ? [
            element("div", {class: "maps"}, ...curves.map(curve => curvePlot(selected, curve))),
            element("p", {class: "soft"}, NOTE),
          ]
        : []),
    );
  };
}

/** Return a map as an element: pictures and words with their relevance, its meaning, its agreement and its areas. */
function mapCard(page, passage, map, state, place) {
  const units = page.units(passage, map.side, state.get("words"));
  const values = unitRelevance(units, map.values);
  const known = values.filter(value => !Number.isNaN(value));
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const scale = {largest: Math.max(Math.abs(low), Math.abs(high)), strength: 1};
  const {text, warning} = agreementText(map.agreement);
  const areas = CURVES.filter(({name}) => map.curves[name]).map(({name}) => areasOf(map.curves, name));
  return element(
    "div",
    {class: `map ${seriesClass(place)}`},
    element("h4", {}, map.curves.deletion ? element("span", {class: "swatch", "aria-hidden": "true"}) : null, map.method),
    element("div", {class: low < 0 ? "difference" : ""}, sentenceLine(units, values, {word: scale, patch: scale})),
    element("p", {class: "soft"}, `${map.meaning} From ${formatNumber(low)} to ${formatNumber(high)}.`),
    ...[text, ...areas].filter(Boolean).map(line => element("p", {}, line)),
    warning ? element("p", {class: "warning"}, warning) : null,
  );
}

/** Return the areas under a curve and under the mean over random orders as text. */
function areasOf(curves, name) {
  const random = curves[`random ${name}`];
  const title = `${name[0].toUpperCase()}${name.slice(1)}: area ${formatNumber(areaUnder(curves[name]))}`;
  return title + (random ? ` (random order ${formatNumber(areaUnder(random))})` : "");
}

/** Return a plot of the curves of all maps, and of the mean over random orders. */
function curvePlot(maps, {name, axis}) {
  const {width, height, left, bottom, top, right} = PLOT;
  const drawn = maps.map((map, place) => ({map, place})).filter(({map}) => map.curves[name]);
  const random = drawn.map(({map}) => map.curves[`random ${name}`]).find(Boolean);
  const numbers = [...drawn.flatMap(({map}) => [...map.curves[name]]), ...(random ?? [])];
  const [least, largest] = [Math.min(0, ...numbers), Math.max(1e-9, ...numbers)];
  const measure = least < 0 || largest > 1 ? "score" : "probability";
  const pathOf = (values, type) => {
    const x = place => left + (place / Math.max(values.length - 1, 1)) * (width - left - right);
    const y = value => height - bottom - ((value - least) / (largest - least)) * (height - bottom - top);
    const points = Array.from(values, (value, place) => `${x(place).toFixed(1)} ${y(value).toFixed(1)}`);
    return svgElement("path", {class: `curve ${type}`, d: `M${points.join("L")}`, fill: "none"});
  };
  const text = (x, y, anchor, content) => svgElement("text", {x, y, "text-anchor": anchor}, content);
  const areas = drawn.map(({map}) => `${map.method}: ${areasOf(map.curves, name)}`).join("; ");
  return element(
    "figure",
    {class: "map-curve"},
    element("figcaption", {class: "soft"}, `${name[0].toUpperCase()}${name.slice(1)}: ${measure} of the token`),
    svgElement(
      "svg",
      {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `The ${measure} against ${axis}. ${areas}`},
      svgElement("path", {class: "axis", d: `M${left} ${top}V${height - bottom}H${width - right}`, fill: "none"}),
      random ? pathOf(random, "random") : "",
      ...drawn.map(({map, place}) => pathOf(map.curves[name], seriesClass(place))),
      text(left - 4, top + 8, "end", formatNumber(largest)),
      text(left - 4, height - bottom, "end", least < 0 ? formatNumber(least) : "0"),
      text(left, height - 4, "start", "0 %"),
      text((left + width) / 2, height - 4, "middle", axis),
      text(width - right, height - 4, "end", "100 %"),
    ),
  );
}
