/** Running text or picture whose words can be tinted, activated, pinned and marked. */
import {element} from "./dom.js";
import {directionOf, shortened, unitName} from "./words.js";
import {nearestInLine} from "./navigate.js";

/** Time without scrolling after which a text counts as scrolled, in milliseconds. */
const SCROLL_PAUSE = 150;

/** Longest word that is shown completely, in characters. */
const LONGEST_WORD = 60;

/** Labels of white space. */
const BLANK = /^(\\[nrt]|␣|\s)+$/;

/** Characters that change the direction of what follows them. */
const DIRECTION_MARKS = /[\u202a-\u202e\u2066-\u2069]/;

/**
 * Return a view of one side of a passage.
 *
 * The units are options of a list box with one tab stop; arrow keys move between them. All events are handled by the
 * list box, so that long texts stay fast.
 *
 * @param options {side, units, label, multiple, over(unit or null), focused(unit), chosen(unit), scrolled(unit)}: `scrolled`
 *   is called with the first visible unit
 */
export function createText({
  side,
  units,
  label,
  multiple = false,
  over = () => {},
  focused = () => {},
  chosen = () => {},
  scrolled = () => {},
}) {
  const words = units.labels.map((_, unit) => wordElement(units, unit));
  const root = element("div", {
    class: side.image ? "picture" : "text",
    role: "listbox",
    "aria-label": label,
    "aria-multiselectable": multiple ? "true" : null,
    "aria-orientation": "horizontal",
  });
  if (side.image) fillPicture(root, side.image, units, words);
  else fillText(root, units, words);
  if (words.length) words[0].tabIndex = 0;
  let stop = 0;
  let tinted = [];
  let pointed = null;

  const unitAt = target => {
    const word = target.closest?.(".word");
    return word && root.contains(word) ? Number(word.dataset.unit) : null;
  };
  const point = unit => {
    if (unit !== pointed) over((pointed = unit));
  };
  root.addEventListener("pointerover", event => point(unitAt(event.target)));
  root.addEventListener("pointerleave", () => point(null));
  let pause = 0;
  root.addEventListener("scroll", () => {
    clearTimeout(pause);
    pause = setTimeout(() => {
      const {top} = root.getBoundingClientRect();
      const first = words.findIndex(word => word.getBoundingClientRect().bottom > top);
      if (first >= 0) scrolled(first);
    }, SCROLL_PAUSE);
  });
  root.addEventListener("click", event => {
    const unit = unitAt(event.target);
    if (unit !== null) {
      rove(unit);
      chosen(unit);
    }
  });
  root.addEventListener("focusin", event => {
    const unit = unitAt(event.target);
    if (unit !== null && event.target.matches(":focus-visible")) focused(unit);
  });
  root.addEventListener("keydown", event => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      chosen(stop);
      return;
    }
    const isMirrored = words[stop]?.closest("[dir]")?.dir === "rtl";
    const next = nextUnit(isMirrored ? (MIRRORED[event.key] ?? event.key) : event.key);
    if (next === undefined) return;
    event.preventDefault();
    if (!words[next]) return;
    rove(next);
    words[next].focus();
  });

  function nextUnit(key) {
    if (key === "ArrowDown" || key === "ArrowUp") {
      const word = nearestInLine(words, stop, key === "ArrowDown");
      return word ? Number(word.dataset.unit) : -1;
    }
    return {ArrowRight: stop + 1, ArrowLeft: stop - 1, Home: 0, End: words.length - 1}[key];
  }

  function rove(unit) {
    words[stop].tabIndex = -1;
    stop = unit;
    words[stop].tabIndex = 0;
  }

  return {
    root,
    units,
    words,
    /** Tint units, {indices, strengths}, from 0 to 1, or from -1 for differences; all other units lose their tint. */
    tint({indices, strengths}) {
      const next = new Set();
      for (let place = 0; place < indices.length; place++) {
        const size = Math.abs(strengths[place]);
        if (!(size > 0.003)) continue;
        const word = words[indices[place]];
        next.add(indices[place]);
        word.style.setProperty("--a", size.toFixed(3));
        word.classList.toggle("lower", strengths[place] < 0);
      }
      for (const unit of tinted) if (!next.has(unit)) words[unit].style.removeProperty("--a");
      tinted = next;
    },
    /** Set a class of exactly these units. */
    flag(name, flagged) {
      for (const word of root.querySelectorAll(`.${name}`))
        if (!flagged.has(Number(word.dataset.unit))) word.classList.remove(name);
      for (const unit of flagged) words[unit]?.classList.add(name);
    },
    /** Scroll the text so that a unit is visible, without moving the page. */
    reveal(unit) {
      const box = words[unit].getBoundingClientRect();
      const frame = root.getBoundingClientRect();
      if (box.top < frame.top || box.bottom > frame.bottom) root.scrollTop += box.top - frame.top - frame.height / 3;
    },
    /** Set which units are selected for assistive technology. */
    select(selected) {
      for (const word of root.querySelectorAll('[aria-selected="true"]')) word.setAttribute("aria-selected", "false");
      for (const unit of selected) words[unit]?.setAttribute("aria-selected", "true");
    },
  };
}

/** Arrow keys in a line that is written from right to left. */
const MIRRORED = {ArrowLeft: "ArrowRight", ArrowRight: "ArrowLeft"};

/** Return the element of a word. <bdi> keeps special tokens and direction marks from changing the order of their line. */
function wordElement(units, unit) {
  const label = units.labels[unit];
  const classes = ["word"];
  for (const flag of ["special", "generated"]) if (units[flag][unit]) classes.push(flag);
  if (BLANK.test(label)) classes.push("blank");
  return element(
    units.special[unit] || DIRECTION_MARKS.test(label) ? "bdi" : "span",
    {
      class: classes.join(" "),
      role: "option",
      "aria-selected": "false",
      tabindex: -1,
      "data-unit": unit,
      title: label.length > LONGEST_WORD ? shortened(label, 300) : null,
    },
    shortened(label, LONGEST_WORD),
  );
}

/** Fill the root with words. Each line of the text has the direction of its words. */
function fillText(root, units, words) {
  let first = 0;
  for (let unit = 1; unit <= words.length; unit++) {
    if (unit < words.length && !units.lineBreak[unit]) continue;
    const line = element("div", {dir: directionOf(units.labels.slice(first, unit).filter((_, at) => !units.special[first + at]))});
    for (; first < unit; first++) {
      const isApart = units.space[first] || units.special[first] || units.special[first - 1];
      line.append(isApart && line.firstChild ? " " : "", words[first]);
    }
    root.append(line);
  }
}

/** Fill the root with a picture, its patches as rectangles, and tokens that stand for no patch below it. */
function fillPicture(root, image, units, words) {
  const frame = element(
    "div",
    {class: "picture-frame"},
    element("img", {src: image.source, alt: "", width: image.width, height: image.height}),
  );
  frame.style.setProperty("aspect-ratio", `${image.width} / ${image.height}`);
  const others = element("div", {class: "picture-tokens"});
  words.forEach((word, unit) => {
    const box = image.boxes[units.first[unit]];
    if (!box) {
      others.append(word, " ");
      return;
    }
    word.classList.add("patch");
    word.textContent = "";
    word.setAttribute("aria-label", unitName(units, unit));
    ["left", "top", "width", "height"].forEach((name, place) => word.style.setProperty(name, `${100 * box[place]}%`));
    frame.append(word);
  });
  root.append(frame, others);
}
