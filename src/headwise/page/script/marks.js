/**
 * Marked words of the sides of a passage, as a text for the address: "0:3.4,1:2" marks the words 3 and 4 of side 0, and
 * word 2 of side 1.
 */

const ENTRY = /^(\d+):(\d+(?:\.\d+)*)$/;

/** Return the marked words of all sides, a Map from side to words. Malformed entries are ignored. */
function marksOfText(text) {
  const marks = new Map();
  for (const entry of text.split(",")) {
    const match = ENTRY.exec(entry);
    if (match) marks.set(Number(match[1]), [...new Set(match[2].split(".").map(Number))]);
  }
  return marks;
}

/** Return the marked words of a side, in the order in which they were marked. */
export function marksOfSide(text, side) {
  return marksOfText(text).get(side) ?? [];
}

/** Return the marks without some words of a side. */
export function marksWithout(text, side, ...words) {
  return textOfMarks(
    marksOfText(text).set(
      side,
      marksOfSide(text, side).filter(other => !words.includes(other)),
    ),
  );
}

/** Return the marks with more words of a side. */
export function marksWith(text, side, ...words) {
  return textOfMarks(marksOfText(text).set(side, [...new Set([...marksOfSide(text, side), ...words])]));
}

function textOfMarks(marks) {
  return [...marks]
    .filter(([, words]) => words.length)
    .sort(([a], [b]) => a - b)
    .map(([side, words]) => `${side}:${words.join(".")}`)
    .join(",");
}
