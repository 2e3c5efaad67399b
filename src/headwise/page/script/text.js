/** Running text and pictures whose words and patches can be tinted, activated, pinned and marked. */
import {element} from "./dom.js";
import {directionOf, shortened, unitName} from "./words.js";
import {nearestInLine} from "./navigate.js";
import {neighbourOf, pictureStrip, rectangleBetween, unitsInside} from "./patches.js";
import {addRegions} from "./region.js";

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
 * @param options {units, label, multiple, over(unit or null), focused(unit), chosen(unit), scrolled(unit), isMarking(),
 *   marked(units, others)}: `scrolled` is called with the first visible unit. While `isMarking`, a rectangle on a picture
 *   marks its patches. Shift with the arrow keys changes such a rectangle: `others` are patches that it no longer has.
 */
export function createText({
  units,
  label,
  multiple = false,
  over = () => {},
  focused = () => {},
  chosen = () => {},
  scrolled = () => {},
  isMarking = () => false,
  marked = () => {},
}) {
  const words = units.labels.map((_, unit) => wordElement(units, unit));
  const root = element("div", {
    class: "side-words",
    role: "listbox",
    "aria-label": label,
    "aria-multiselectable": multiple ? "true" : null,
    "aria-orientation": "horizontal",
  });
  const text = element("div", {class: "text"});
  const hasNames = units.pictures.length > 1 || units.noun !== "patch";
  const strip = pictureStrip(units, unit => patchElement(units, unit, words[unit]), hasNames);
  fillText(text, units, words);
  root.append(...(strip ? [strip] : []), text);
  if (words.length) words[0].tabIndex = 0;
  let stop = 0;
  let tinted = [];
  let pointed = null;
  let region = null;

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
  text.addEventListener("scroll", () => {
    clearTimeout(pause);
    pause = setTimeout(() => {
      const {top} = text.getBoundingClientRect();
      const first = words.findIndex((word, unit) => !units.patches[unit] && word.getBoundingClientRect().bottom > top);
      if (first >= 0) scrolled(first);
    }, SCROLL_PAUSE);
  });
  if (strip) addRegions(strip, isMarking, (picture, rectangle) => marked(unitsInside(units, picture, rectangle), []));
  root.addEventListener("click", event => {
    region = null;
    const unit = unitAt(event.target);
    if (unit !== null) {
      rove(unit);
      chosen(unit);
    }
  });
  root.addEventListener("focusin", event => {
    const unit = unitAt(event.target);
    if (unit === null) return;
    rove(unit);
    if (event.target.matches(":focus-visible")) focused(unit);
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
    const from = stop;
    words[next].focus();
    extend(from, event.shiftKey && isMarking() ? next : null);
  });

  /** Return the unit to which a key moves: the next patch of the picture, or the next word, if there is one. */
  function nextUnit(key) {
    const neighbour = neighbourOf(units, stop, key);
    if (neighbour !== undefined) return neighbour;
    if (key === "ArrowDown" || key === "ArrowUp") {
      const all = [...root.querySelectorAll(".word")];
      const word = nearestInLine(all, all.indexOf(words[stop]), key === "ArrowDown");
      return word ? Number(word.dataset.unit) : -1;
    }
    const step = {ArrowRight: 1, ArrowLeft: -1}[key];
    if (!step) return {Home: 0, End: words.length - 1}[key];
    let next = stop + step;
    if (!units.patches[stop]) while (units.patches[next]) next += step;
    return words[next] ? next : stop + step;
  }

  /** Mark the rectangle from the patch at which Shift was pressed to another patch. */
  function extend(before, unit) {
    const picture = units.patches[before]?.[0];
    if (unit === null || picture === undefined || units.patches[unit]?.[0] !== picture) {
      region = null;
      return;
    }
    const from = region?.from ?? before;
    const inside = unitsInside(units, picture, rectangleBetween(units.patches[from], units.patches[unit]));
    marked(inside, (region?.inside ?? []).filter(other => !inside.includes(other)));
    region = {from, inside};
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
    /** Scroll the text or the pictures so that a unit is visible, without moving the page. */
    reveal(unit) {
      const box = words[unit].getBoundingClientRect();
      const scroller = units.patches[unit] ? strip : text;
      const frame = scroller.getBoundingClientRect();
      if (box.top < frame.top || box.bottom > frame.bottom) scroller.scrollTop += box.top - frame.top - frame.height / 3;
      if (box.left < frame.left || box.right > frame.right) scroller.scrollLeft += box.left - frame.left - frame.width / 3;
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

/** Return the element of a patch, which has its name as a label instead of a text. */
function patchElement(units, unit, word) {
  word.textContent = "";
  word.setAttribute("aria-label", unitName(units, unit));
  return word;
}

/** Fill the root with words. Each line of the text has the direction of its words. Patches are named by their picture. */
function fillText(root, units, words) {
  const isMixed = units.noun === "word or patch";
  let first = 0;
  let named = null;
  for (let unit = 1; unit <= words.length; unit++) {
    if (unit < words.length && !units.lineBreak[unit]) continue;
    const isWord = (_, at) => !units.special[first + at] && !units.patches[first + at];
    const line = element("div", {dir: directionOf(units.labels.slice(first, unit).filter(isWord))});
    for (; first < unit; first++) {
      const picture = units.patches[first]?.[0] ?? null;
      if (picture !== null) {
        if (isMixed && picture !== named) line.append(" ", element("span", {class: "soft"}, `[${units.pictures[picture].name}]`), " ");
        named = picture;
        continue;
      }
      if (!units.special[first]) named = null;
      const isApart = units.space[first] || units.special[first] || units.special[first - 1];
      line.append(isApart && line.firstChild ? " " : "", words[first]);
    }
    if (line.firstChild) root.append(line);
  }
}
