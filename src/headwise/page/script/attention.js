/**
 * Attention of one head between units (words or tokens).
 *
 * The row of a word is the mean of the rows of its tokens that have a visible key. Attention to a word is the sum over
 * its tokens. A matrix lists, for each query, the visible keys in ascending order. If only the largest weights are
 * stored, it lists these, and its weights are lower bounds, because stored weights are rounded down. `rest` is an upper
 * bound of the attention of a query that is not in its listed weights, `unlisted` of its attention on keys that are not
 * listed, and `least` of a single weight that is not listed.
 */
import {angularTable, visibleKeys} from "./decode.js";

/** Largest rounding error of the total of a row, which is stored with 16 bits: pi / 4 / 65535. */
const TOTAL_ERROR = 1.2e-5;

/** Return the matrix between the units of two sides. Entry e of query q: start[q] <= e < start[q + 1]. */
export function unitMatrix(attention, visibility, queryUnits, keyUnits) {
  const start = new Int32Array(queryUnits.count + 1);
  const total = new Float32Array(queryUnits.count);
  const rest = new Float32Array(queryUnits.count);
  const unlisted = new Float32Array(queryUnits.count);
  const least = new Float32Array(queryUnits.count);
  const visible = new Uint8Array(queryUnits.count);
  const keys = [];
  const weights = [];
  const sums = new Float64Array(keyUnits.count);
  const listed = new Uint8Array(keyUnits.count);
  const table = angularTable(attention.exact ? 65535 : 255);
  for (let unit = 0; unit < queryUnits.count; unit++) {
    const touched = [];
    let rows = 0;
    for (let query = queryUnits.first[unit]; query < queryUnits.first[unit + 1]; query++) {
      if (visibility.first[query] === visibility.first[query + 1]) continue;
      rows += 1;
      let rowSum = 0;
      let entries = 0;
      let smallest = attention.exact ? 65535 : 255;
      forEachWeight(attention, visibility, query, (key, code) => {
        const weight = table[code];
        const keyUnit = keyUnits.of[key];
        if (!listed[keyUnit]) {
          listed[keyUnit] = 1;
          touched.push(keyUnit);
        }
        sums[keyUnit] += weight;
        rowSum += weight;
        entries += 1;
        if (code < smallest) smallest = code;
      });
      const rowTotal = attention.exact ? rowSum : attention.totals[query];
      total[unit] += rowTotal;
      if (attention.exact) continue;
      const rowRest = Math.max(Math.min(rowTotal + TOTAL_ERROR, 1) - rowSum, 0);
      rest[unit] += rowRest;
      if (entries === visibleKeys(visibility, query)) continue;
      unlisted[unit] += rowRest;
      // A weight is below the weight of the next code, and no weight that is not listed is above a listed one.
      least[unit] += Math.min(rowRest, table[Math.min(smallest + 1, 255)]);
    }
    visible[unit] = Number(rows > 0);
    touched.sort((a, b) => a - b);
    for (const keyUnit of touched) {
      keys.push(keyUnit);
      weights.push(sums[keyUnit] / rows);
      sums[keyUnit] = 0;
      listed[keyUnit] = 0;
    }
    start[unit + 1] = keys.length;
    for (const numbers of [total, rest, unlisted, least]) numbers[unit] /= Math.max(rows, 1);
  }
  return {
    exact: attention.exact,
    queryUnits,
    keyUnits,
    visibility,
    start,
    key: Int32Array.from(keys),
    weight: Float32Array.from(weights),
    total,
    rest,
    unlisted,
    least,
    visible,
    columns: null,
  };
}

/** Call `visit(key, code)` for each stored weight of a query whose key is visible. */
function forEachWeight(attention, visibility, query, visit) {
  if (!attention.exact) {
    let run = visibility.first[query];
    const last = visibility.first[query + 1];
    for (let entry = attention.start[query]; entry < attention.start[query + 1]; entry++) {
      const key = attention.key[entry];
      while (run < last && visibility.stop[run] <= key) run += 1;
      if (run < last && visibility.start[run] <= key) visit(key, attention.codes[entry]);
    }
    return;
  }
  for (let run = visibility.first[query]; run < visibility.first[query + 1]; run++) {
    for (let key = visibility.start[run]; key < visibility.stop[run]; key++)
      visit(key, attention.codes[query * attention.keys + key]);
  }
}

/** Return the listed keys of a query and their weights. */
export function rowOf(matrix, query) {
  const from = matrix.start[query];
  const to = matrix.start[query + 1];
  return {indices: matrix.key.subarray(from, to), weights: matrix.weight.subarray(from, to)};
}

/** Return the queries that list a key, and their weights on it. */
export function columnOf(matrix, key) {
  matrix.columns ??= transposed(matrix);
  const {start, query, weight} = matrix.columns;
  return {indices: query.subarray(start[key], start[key + 1]), weights: weight.subarray(start[key], start[key + 1])};
}

/** Return the entries of a matrix sorted by key. */
function transposed(matrix) {
  const start = new Int32Array(matrix.keyUnits.count + 1);
  for (const key of matrix.key) start[key + 1] += 1;
  for (let key = 0; key < matrix.keyUnits.count; key++) start[key + 1] += start[key];
  const next = start.slice();
  const query = new Int32Array(matrix.key.length);
  const weight = new Float32Array(matrix.key.length);
  for (let row = 0; row < matrix.queryUnits.count; row++) {
    for (let entry = matrix.start[row]; entry < matrix.start[row + 1]; entry++) {
      const place = next[matrix.key[entry]]++;
      query[place] = row;
      weight[place] = matrix.weight[entry];
    }
  }
  return {start, query, weight};
}

/** Return the listed weight of a query on a key, or null if the matrix does not list it. */
export function weightAt(matrix, query, key) {
  const {indices, weights} = rowOf(matrix, query);
  let low = 0;
  let high = indices.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (indices[middle] < key) low = middle + 1;
    else high = middle;
  }
  return indices[low] === key ? weights[low] : null;
}

/** Return true if at least one token of the key is visible to at least one token of the query. */
export function isVisible(matrix, query, key) {
  const {queryUnits, keyUnits, visibility} = matrix;
  for (let token = queryUnits.first[query]; token < queryUnits.first[query + 1]; token++) {
    if (visibleKeys(visibility, token, keyUnits.first[key], keyUnits.first[key + 1])) return true;
  }
  return false;
}

/** Return a flag for each key: 1 if it is visible to the query, as in `isVisible`. */
export function visibleUnits({queryUnits, keyUnits, visibility}, query) {
  const flags = new Uint8Array(keyUnits.count);
  for (let token = queryUnits.first[query]; token < queryUnits.first[query + 1]; token++) {
    for (let run = visibility.first[token]; run < visibility.first[token + 1]; run++) {
      const [start, stop] = [visibility.start[run], visibility.stop[run]];
      if (start < stop) flags.fill(1, keyUnits.of[start], keyUnits.of[stop - 1] + 1);
    }
  }
  return flags;
}

/** Return an upper bound of a weight that the matrix does not list. */
export function unlistedBound(matrix, query, key) {
  const tokens = matrix.keyUnits.first[key + 1] - matrix.keyUnits.first[key];
  return Math.min(matrix.unlisted[query], tokens * matrix.least[query]);
}

/**
 * Return a flag for each query: 1 if its row is shown. If `onlyGenerated`, these are the rows of generated words, unless the
 * text has none.
 */
export function shownRows({visible, queryUnits}, hiddenQueries, onlyGenerated) {
  const isGenerated = onlyGenerated && queryUnits.generated.includes(1);
  return visible.map((sees, query) =>
    Number(sees && !hiddenQueries[query] && (!isGenerated || queryUnits.generated[query])),
  );
}

/** Return the mean attention that each key receives from the given rows. */
export function receivedAttention(matrix, rows) {
  const received = new Float64Array(matrix.keyUnits.count);
  let count = 0;
  for (let query = 0; query < rows.length; query++) {
    if (!rows[query]) continue;
    count += 1;
    for (let entry = matrix.start[query]; entry < matrix.start[query + 1]; entry++)
      received[matrix.key[entry]] += matrix.weight[entry];
  }
  return received.map(sum => sum / Math.max(count, 1));
}

/** Return the share of the attention of the given rows that is on hidden keys. */
export function hiddenShare(matrix, rows, hiddenKeys) {
  const received = receivedAttention(matrix, rows);
  let total = 0;
  let count = 0;
  rows.forEach((shown, query) => {
    if (shown) {
      total += matrix.total[query];
      count += 1;
    }
  });
  const hidden = received.reduce((sum, weight, key) => sum + (hiddenKeys[key] ? weight : 0), 0);
  return total > 0 ? hidden / (total / count) : 0;
}
