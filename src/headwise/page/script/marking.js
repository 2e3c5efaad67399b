/** Marks of the words and patches to which the chosen head may attend. */
import {marksOfSide, marksWith, marksWithout} from "./marks.js";

/** Return functions that change and return the marks on the key side of the chosen head, {mark(units, others), units(), side()}. */
export function createMarking({page, state, passage, model, head, announce}) {
  const stored = () => page.passages[passage()]?.heads[model()][head()];
  const side = () => page.passages[passage()].sides[stored().keys];

  /**
   * Mark units, or remove their marks if all of them are marked. Also remove the marks of `others`. Marks are words, also
   * when tokens are shown.
   */
  function mark(units, others = []) {
    const {keys} = stored();
    const {wordOf} = side();
    const [words, removed] = [units, others].map(each => (state.get("words") ? each : each.map(unit => wordOf[unit])));
    const marks = marksWithout(state.get("marks"), keys, ...removed);
    const before = marksOfSide(marks, keys);
    const areMarked = !removed.length && words.every(word => before.includes(word));
    state.set({marks: (areMarked ? marksWithout : marksWith)(marks, keys, ...words)});
    const subject = page.say(words.length === 1 ? "The word is" : `The ${words.length} words are`);
    announce(areMarked ? "The mark was removed." : `${subject} marked.`);
  }

  /** Return the units that are marked, as a Set. */
  function units() {
    if (!stored()) return new Set();
    const words = marksOfSide(state.get("marks"), stored().keys);
    if (state.get("words")) return new Set(words);
    const {wordOf} = side();
    return new Set([...wordOf.keys()].filter(token => words.includes(wordOf[token])));
  }

  return {mark, units, side};
}
