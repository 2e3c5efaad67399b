/** Difference of the attention weights of two models, B − A. */
import {rowOf} from "./attention.js";

/**
 * Return the difference of two matrices of the same units, as a matrix whose weights have signs.
 *
 * A weight that one of the matrices does not list counts as 0, so that the difference is approximate if only the largest
 * weights are stored. `parts` are the two matrices.
 */
export function differenceMatrix(a, b) {
  const start = new Int32Array(a.start.length);
  const keys = [];
  const weights = [];
  for (let query = 0; query + 1 < start.length; query++) {
    const [before, after] = [rowOf(a, query), rowOf(b, query)];
    const row = new Map();
    before.indices.forEach((key, place) => row.set(key, -before.weights[place]));
    after.indices.forEach((key, place) => row.set(key, (row.get(key) ?? 0) + after.weights[place]));
    for (const key of [...row.keys()].sort((one, other) => one - other)) {
      keys.push(key);
      weights.push(row.get(key));
    }
    start[query + 1] = keys.length;
  }
  const zeros = new Float32Array(a.queryUnits.count);
  return {
    ...a,
    exact: true,
    approximate: !(a.exact && b.exact),
    signed: true,
    parts: [a, b],
    start,
    key: Int32Array.from(keys),
    weight: Float32Array.from(weights),
    rest: zeros,
    unlisted: zeros,
    least: zeros,
    columns: null,
  };
}

/** Return the tiles of B minus those of A. */
export function differenceTiles(a, b) {
  return a && b && {...a, weights: b.weights.map((weight, tile) => weight - a.weights[tile])};
}
