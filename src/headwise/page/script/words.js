/** Units of a text: its words, or its tokens when word pieces are not merged. Patches of pictures are units, too. */
import {shownPatches} from "./patches.js";

const PUNCTUATION = /^[\p{P}\p{Z}\p{C}\p{Sm}\p{Sc}\p{Sk}]*$/u;

/** Label of a patch: its row and column. */
const PATCH = /^\((\d+), (\d+)\)$/;

/** Characters as readers see them: a letter with its marks, a flag or a family of emoji is one character. */
const SEGMENTER = new Intl.Segmenter("en", {granularity: "grapheme"});

/** Letters and marks that are written from right to left. */
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

function charactersOf(text) {
  return Array.from(SEGMENTER.segment(text), ({segment}) => segment);
}

/** Return the direction of a line of words, "rtl" or "ltr": that of most of them, or of the first if there are as many. */
export function directionOf(labels) {
  const directions = labels.filter(label => /\p{L}/u.test(label)).map(label => RIGHT_TO_LEFT.test(label));
  const many = directions.filter(Boolean).length;
  const half = directions.length / 2;
  return many > half || (many === half && directions[0]) ? "rtl" : "ltr";
}

/** Return the parts of two names that differ: whole words, without those that both names begin or end with. */
export function differingParts(...names) {
  const [a, b] = names.map(name => name.split(/([\s,/_-]+)/));
  const most = Math.min(a.length, b.length) - 1;
  let start = 0;
  while (start < most && a[start] === b[start]) start += 1;
  start -= start % 2;
  let stop = 0;
  // The last words of two names explain what differs, as in "3 texts".
  const isEnd = word => !/\s/.test(word);
  while (stop < most - start && a.at(-1 - stop) === b.at(-1 - stop) && isEnd(a.at(-2 - stop))) stop += 1;
  stop -= stop % 2;
  return [a, b].map(words => words.slice(start, words.length - stop).join(""));
}

/** Return a text that does not change the order of its neighbours if it is written from right to left. */
export function isolated(text) {
  return RIGHT_TO_LEFT.test(text) ? `\u2068${text}\u2069` : text;
}

/** Return the beginning of a text, cut between words, with "…" if it is cut. */
export function beginning(text, limit) {
  const characters = charactersOf(text);
  if (characters.length <= limit) return text;
  const start = characters.slice(0, limit).join("");
  const cut = (start + characters[limit]).search(/\s+\S*$/);
  return `${cut > limit / 2 ? start.slice(0, cut) : start}…`;
}

/** Shorten a long text in the middle, so that it has at most about `limit` characters. */
export function shortened(text, limit = 32) {
  if (text.length <= limit) return text;
  const most = 16 * limit;
  const head = charactersOf(text.slice(0, most));
  if (text.length <= most && head.length <= limit) return text;
  const tail = charactersOf(text.slice(-most));
  const left = Math.ceil(limit * 0.6);
  const right = Math.floor(limit * 0.3);
  return `${head.slice(0, left).join("")}…${tail.slice(-right).join("")}`;
}

/**
 * Return the units of a side.
 *
 * Unit u covers the tokens first[u] <= t < first[u + 1], and token t belongs to unit of[t]. Each unit has a label, and
 * flags: special, punctuation, generated, space (white space before it) and lineBreak (a line break before it). Units of
 * a picture have a patch, other units null. `noun` is the name of a unit, "word", "patch" or "word or patch"; `nouns` is
 * its plural. Special tokens do not count for it.
 */
export function unitsOf(side, merged) {
  const of = merged ? Int32Array.from(side.wordOf) : Int32Array.from(side.tokens, (_, token) => token);
  const texts = merged ? side.words : side.tokens;
  const count = texts.length;
  const first = new Int32Array(count + 1).fill(side.tokens.length);
  for (let token = of.length - 1; token >= 0; token--) first[of[token]] = token;
  const shown = shownPatches(side);
  const patches = texts.map((_, unit) => shown[first[unit]] ?? null);
  const labels = texts.map((text, unit) => {
    const [, row, column] = (patches[unit] && PATCH.exec(text)) ?? [];
    if (!row) return text;
    const {length} = side.pictures;
    return length > 1 ? `${side.pictures[patches[unit][0]].name} (${row}, ${column})` : `row ${row}, column ${column}`;
  });
  const has = isPatch => patches.some((patch, unit) => Boolean(patch) === isPatch && !side.special[first[unit]]);
  const noun = !has(true) ? "word" : has(false) ? "word or patch" : "patch";
  const flags = test => Uint8Array.from(labels, (label, unit) => Number(test(label, unit)));
  const breaks = new Set(side.break);
  const times = new Map();
  for (const label of labels) times.set(label, (times.get(label) ?? 0) + 1);
  return {
    count,
    labels,
    of,
    first,
    merged,
    noun,
    nouns: {word: "words", patch: "patches", "word or patch": "words and patches"}[noun],
    pictures: side.pictures,
    patches,
    special: flags((_, unit) => side.special[first[unit]]),
    punctuation: flags(label => PUNCTUATION.test(label.slice(0, 200))),
    generated: flags((_, unit) => side.generated !== null && first[unit] >= side.generated),
    space: flags((_, unit) => side.space[first[unit]]),
    lineBreak: flags((_, unit) => breaks.has(first[unit])),
    repeated: flags(label => times.get(label) > 1),
  };
}

/** Return "patch" for a patch of a picture, and "word" for another unit. */
export function nounOf({patches}, unit) {
  return patches[unit] ? "patch" : "word";
}

/** Return the label of a unit, with its position counted from 1 if the label occurs more than once, for copied text. */
export function plainName(units, unit, limit = 32) {
  return withPosition(units, unit, shortened(units.labels[unit], limit));
}

/** Return the name of a unit for display: its label, in quotes if it is punctuation, and the position as in `plainName`. */
export function unitName(units, unit, limit = 32) {
  const label = isolated(shortened(units.labels[unit], limit));
  return withPosition(units, unit, isQuoted(units, unit) ? `“${label}”` : label);
}

/** Return the name of a unit in quotes, for a sentence. */
export function quotedName(units, unit, limit = 32) {
  return isQuoted(units, unit) ? unitName(units, unit, limit) : `“${unitName(units, unit, limit)}”`;
}

function isQuoted(units, unit) {
  return units.punctuation[unit] && !units.special[unit];
}

function withPosition(units, unit, label) {
  return units.repeated[unit] ? `${label} (${unit + 1})` : label;
}

/** Return a flag for each unit: 1 if the settings hide it. */
export function hiddenUnits(units, {special, first}) {
  const hidden = new Uint8Array(units.count);
  for (let unit = 0; unit < units.count; unit++) {
    hidden[unit] = Number((special && units.special[unit]) || (first && unit === 0));
  }
  return hidden;
}
