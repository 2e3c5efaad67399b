/**
 * Tiles of a head: attention of groups of queries on groups of keys, as means over the queries of sums over the keys.
 *
 * Token t of n belongs to group floor(t * groups / n), so that the sizes of groups differ by one token.
 */

/** Return the row or column of tiles that a token belongs to. */
export function tileOf(token, tokens, tiles) {
  return Math.floor((token * tiles) / tokens);
}

/** Return the number of tokens of each row or column of tiles. */
export function tileSizes(tokens, tiles) {
  const firstOf = tile => Math.ceil((tile * tokens) / tiles);
  return Int32Array.from({length: tiles}, (_, tile) => firstOf(tile + 1) - firstOf(tile));
}

/** Return the tiles of a head between a number of queries and a number of keys. */
export function tilesOf(rows, columns, queries, keys, weights) {
  return {rows, columns, rowSizes: tileSizes(queries, rows), columnSizes: tileSizes(keys, columns), weights};
}

/** Return the weights that a row of tiles gives each unit: for each of its tokens, the mean weight of the token's tile. */
function unitWeights({keyUnits}, tiles, row) {
  const tokens = keyUnits.of.length;
  const weights = new Float32Array(keyUnits.count);
  for (let token = 0; token < tokens; token++) {
    const column = tileOf(token, tokens, tiles.columns);
    weights[keyUnits.of[token]] += tiles.weights[row * tiles.columns + column] / tiles.columnSizes[column];
  }
  return weights;
}

/** Return a function from a query to the weights of its cells if all weights in a tile were equal. */
export function tileRows({matrix, tiles}) {
  const {queryUnits, keyUnits} = matrix;
  const tokens = queryUnits.of.length;
  const rows = new Map();
  const rowOf = row => {
    if (!rows.has(row)) rows.set(row, unitWeights(matrix, tiles, row));
    return rows.get(row);
  };
  return query => {
    const [first, stop] = [queryUnits.first[query], queryUnits.first[query + 1]];
    const [top, bottom] = [first, stop - 1].map(token => tileOf(token, tokens, tiles.rows));
    if (top === bottom) return rowOf(top);
    const mean = new Float32Array(keyUnits.count);
    for (let token = first; token < stop; token++)
      rowOf(tileOf(token, tokens, tiles.rows)).forEach((weight, key) => {
        mean[key] += weight / (stop - first);
      });
    return mean;
  };
}

/** Return the weight of a cell if all weights in a tile were equal. */
export function tileAverage(grid, query, key) {
  return tileRows(grid)(query)[key];
}
