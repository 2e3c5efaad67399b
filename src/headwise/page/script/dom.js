/** Elements and numbers for display. */

/** Sentence for weights of which only the largest are stored. The largest step is sin(pi / 510), 0.0062. */
export const ROUNDED_DOWN = "Each weight shown may be up to 0.007 too small.";

/**
 * Return a new element. Attributes that are null, undefined or false are left out; functions become event listeners.
 * Children are elements or texts; texts are never parsed as HTML.
 */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Return a new SVG element; see `element`. */
export function svgElement(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

/** Return the element of the page with an id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Height of the settings of the page, which stay above what is scrolled to, in pixels. */
const TOOLBAR_HEIGHT = 64;

/** Scroll this document to a part of the page. `scrollIntoView` would also scroll the document around a frame. */
export function scrollToPart(id) {
  window.scrollTo({top: window.scrollY + byId(id).getBoundingClientRect().top - TOOLBAR_HEIGHT});
}

/** Return a labelled <select>. `options` are {value, text, group}; `choose` is called with the chosen value. */
export function selectField(label, options, value, choose) {
  const select = element("select", {change: () => choose(select.value)});
  const groups = new Map();
  for (const option of options) {
    let parent = select;
    if (option.group) {
      if (!groups.has(option.group)) {
        groups.set(option.group, element("optgroup", {label: option.group}));
        select.append(groups.get(option.group));
      }
      parent = groups.get(option.group);
    }
    parent.append(
      element("option", {value: option.value, selected: String(option.value) === String(value)}, option.text),
    );
  }
  return element("label", {class: "field"}, element("span", {}, label), select);
}

/** Return a labelled check box. */
export function checkField(label, checked, choose) {
  const box = element("input", {type: "checkbox", change: () => choose(box.checked)});
  box.checked = checked;
  return element("label", {class: "check"}, box, label);
}

/** Return a group of buttons of which one is pressed. `options` are [value, text]. */
export function choiceButtons(label, options, value, choose) {
  const group = element("div", {class: "choice", role: "group", "aria-label": label});
  for (const [option, text] of options) {
    group.append(
      element(
        "button",
        {type: "button", "data-value": option, "aria-pressed": String(option === value), click: () => choose(option)},
        text,
      ),
    );
  }
  return group;
}

/** Mark the pressed button of a group that `choiceButtons` returned. */
export function pressChoice(group, value) {
  for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.value === value));
}

/** Return a number with a suitable number of digits, or "–" if it is unknown. */
export function formatNumber(value) {
  if (!Number.isFinite(value)) return "–";
  const size = formatSize(Math.abs(value));
  return `${value < 0 && size !== "0.00" ? "−" : ""}${size}`;
}

const COMPACT = new Intl.NumberFormat("en-US", {notation: "compact"});

/** Return a number in at most six characters, for a small square. */
export function formatShort(value) {
  const size = Math.abs(value);
  if (size > 0 && size < 0.0005) return "≈0";
  if (size > 0 && size < 0.01) return `${value < 0 ? "−" : ""}${size.toFixed(size < 0.0095 ? 3 : 2)}`;
  if (!(size >= 10_000)) return formatNumber(value);
  return `${value < 0 ? "−" : ""}${size >= 1e15 ? size.toExponential(0) : COMPACT.format(size)}`;
}

function formatSize(size) {
  if (size >= 1e6) return size.toExponential(2);
  if (size >= 100) return Math.round(size).toLocaleString("en-US");
  if (size >= 10) return size.toFixed(1);
  if (size >= 0.01 || size < 1e-6) return size.toFixed(2);
  return size < 0.001 ? size.toPrecision(1) : size.toFixed(3);
}

/** Return an attention weight with two digits; a small weight that is not 0 is shown as "<0.01". */
export function formatWeight(weight) {
  return weight > 0 && weight < 0.005 ? "<0.01" : weight.toFixed(2);
}

/** Return a difference of weights with its sign and at least two digits. */
export function formatSigned(difference) {
  const size = Math.abs(difference);
  const text = size < 0.01 ? formatNumber(size) : size.toFixed(2);
  return text === "0.00" ? text : `${difference < 0 ? "−" : "+"}${text}`;
}

/** Return a lower bound of a weight, rounded down, so that it stays a lower bound. One that is almost 0 is ">0". */
export function formatAtLeast(bound) {
  if (bound > 0 && bound < 0.001) return ">0";
  const digits = bound > 0 && bound < 0.01 ? 3 : 2;
  // Float32 numbers are up to 6e-8 below the decimal number that they stand for.
  const rounded = Math.floor(bound * 10 ** digits + 1e-5) / 10 ** digits;
  return `${rounded < 0 ? "−" : ""}${Math.abs(rounded).toFixed(digits)}`;
}

/** Return a lower bound of a number as words: "at least 0.33", "≥ 0", or "unknown" if it is negative. */
export function formatBound(bound) {
  if (bound < 0) return "unknown";
  return bound < 0.001 ? "≥ 0" : `at least ${formatAtLeast(bound)}`;
}

/** Return an upper bound of a weight with three digits, rounded up, so that it stays an upper bound. */
export function formatAtMost(bound) {
  return (Math.ceil(bound * 1000) / 1000).toFixed(3);
}

/** Return a weight of a matrix as text. If only the largest weights are stored, it is a lower bound. */
export function formatListed(matrix, weight) {
  if (matrix.signed) return formatSigned(weight);
  return matrix.exact ? formatWeight(weight) : formatAtLeast(weight);
}

/** Return a lower bound of a share as a percentage, rounded down. */
export function formatPercentAtLeast(share) {
  const digits = share > 0 && share < 0.01 ? 1 : 0;
  return `${(Math.floor(share * 100 * 10 ** digits + 1e-5) / 10 ** digits).toFixed(digits)} %`;
}

/** Return a share as a percentage, with one digit after the point if it is small. */
export function formatPercent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.01 ? 1 : 0)} %`;
}

/** Return a whole number with a noun in singular or plural, such as "1 head" or "72 heads". */
export function counted(number, noun) {
  return `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
}

/** Return an ordinal number, such as "3rd". */
export function ordinal(number) {
  const tens = (number % 100) - (number % 10);
  const ending = tens === 10 ? "th" : (["th", "st", "nd", "rd"][number % 10] ?? "th");
  return `${number.toLocaleString("en-US")}${ending}`;
}

/** Return a promise that resolves after pending events were handled. */
export function nextTask() {
  return new Promise(resolve => {
    setTimeout(resolve, 0);
  });
}
