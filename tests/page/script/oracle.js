/** Random attention of one head, its encoded bytes, and brute-force results between words. */

/** Return a generator of random numbers from 0 to 1 (mulberry32). */
export function randomNumbers(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let value = Math.imul(state ^ (state >>> 15), 1 | state);
    value = (value + Math.imul(value ^ (value >>> 7), 61 | value)) ^ value;
    return ((value ^ (value >>> 14)) >>> 0) / 4294967296;
  };
}

/** Return a side with words of random lengths. */
export function randomSide(tokens, random, generated = null) {
  const wordOf = [0];
  while (wordOf.length < tokens) wordOf.push(wordOf.at(-1) + Number(random() < 0.7));
  const words = Array.from({length: wordOf.at(-1) + 1}, (_, word) => (random() < 0.15 ? "," : `word${word % 5}`));
  const special = wordOf.map(word => Number(word === 0));
  return {
    name: "text",
    tokens: wordOf.map((_, token) => `t${token}`),
    space: wordOf.map(() => 1),
    break: [],
    special,
    words,
    wordOf,
    generated,
    pictures: [],
    patches: [],
  };
}

/**
 * Return random weights, rows of numbers; null where a key is not visible. Some rows see no key.
 *
 * @param causal false, true, or "window": a query sees itself and the 4 keys before it
 */
export function randomWeights(queries, keys, random, causal) {
  return Array.from({length: queries}, (_, query) => {
    const isBlind = random() < 0.08 && query > 0;
    const row = Array.from({length: keys}, (__, key) =>
      isBlind || (causal && key > query) || (causal === "window" && key < query - 4) ? null : random() ** 6 + 1e-4,
    );
    const total = row.reduce((sum, weight) => sum + (weight ?? 0), 0);
    return row.map(weight => (weight === null ? null : weight / total));
  });
}

const codeOf = (weight, levels, rounded = Math.round) =>
  rounded(((Math.asin(Math.sqrt(weight)) * 2) / Math.PI) * levels);
const weightOf = (code, levels) => Math.sin(((code / levels) * Math.PI) / 2) ** 2;

/** Return the bytes of all weights and the weights that they decode to. */
export function denseBytes(weights) {
  const codes = Uint16Array.from(weights.flat(), weight => codeOf(weight ?? 0, 65535));
  return {
    buffer: codes.buffer,
    stored: weights.map(row => row.map(weight => (weight === null ? null : weightOf(codeOf(weight, 65535), 65535)))),
  };
}

/** Return the bytes of the largest weights of each row, and these weights; null where none is listed. */
export function sparseBytes(weights, limit) {
  const stored = weights.map(row => {
    const order = [...row.keys()]
      .filter(key => row[key] !== null)
      .sort((a, b) => row[b] - row[a])
      .slice(0, limit);
    return row.map((weight, key) => (order.includes(key) ? weightOf(codeOf(weight, 255, Math.floor), 255) : null));
  });
  const listed = stored.map((row, query) =>
    [...row.keys()].filter(key => row[key] !== null).map(key => [key, codeOf(weights[query][key], 255, Math.floor)]),
  );
  const totals = weights.map(row => row.reduce((sum, weight) => sum + (weight ?? 0), 0));
  return {
    stored,
    totals,
    buffer: joined(
      Int32Array.of(listed.flat().length),
      Uint16Array.from(listed, row => row.length),
      Uint16Array.from(totals, total => codeOf(Math.min(total, 1), 65535)),
      Uint16Array.from(listed.flat(), ([key]) => key),
      Uint8Array.from(listed.flat(), ([, code]) => code),
    ),
  };
}

/** Return the bytes of the runs of visible keys. */
export function visibilityBytes(weights) {
  const runs = weights.map(row => {
    const found = [];
    row.forEach((weight, key) => {
      if (weight === null) return;
      if (found.length && found.at(-1)[1] === key) found.at(-1)[1] = key + 1;
      else found.push([key, key + 1]);
    });
    return found;
  });
  return joined(
    Int32Array.of(runs.flat().length),
    Uint16Array.from(runs, row => row.length),
    Uint32Array.from(runs.flat(), ([start]) => start),
    Uint32Array.from(runs.flat(), ([, stop]) => stop),
  );
}

function joined(...arrays) {
  const bytes = new Uint8Array(arrays.reduce((sum, array) => sum + array.byteLength, 0));
  let offset = 0;
  for (const array of arrays) {
    bytes.set(new Uint8Array(array.buffer), offset);
    offset += array.byteLength;
  }
  return bytes.buffer;
}

/** Return attention between words: means over the rows of a word that see a key, sums over the tokens of a key word. */
export function wordWeights(stored, querySide, keySide, isVisible) {
  return querySide.words.map((_, query) => {
    const rows = [...querySide.wordOf.keys()].filter(
      token => querySide.wordOf[token] === query && isVisible[token].includes(true),
    );
    return keySide.words.map((__, key) => {
      const keys = [...keySide.wordOf.keys()].filter(token => keySide.wordOf[token] === key);
      if (!rows.some(row => keys.some(token => stored[row][token] !== null))) return null;
      return (
        rows.reduce((sum, row) => sum + keys.reduce((part, token) => part + (stored[row][token] ?? 0), 0), 0) /
        rows.length
      );
    });
  });
}
