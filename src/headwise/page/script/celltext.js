/** Weight of a cell of a matrix as text. */
import {formatAtMost, formatBound, formatNumber, formatSigned, formatWeight} from "./dom.js";
import {isVisible, unlistedBound, weightAt} from "./attention.js";
import {tileAverage} from "./tiles.js";
import {unitName} from "./words.js";

/** Return a sentence about cells whose weight is not stored. */
export function tilesNote({matrix, rows, tiles}) {
  if (!(matrix.approximate ?? !matrix.exact) || !tiles) return "";
  const size = Math.round(rows.length / tiles.rows);
  const block = size > 1 ? `, a square of about ${size} by ${size} ${matrix.keyUnits.nouns}` : "";
  const mean = `the mean weight of the tile around it${block}`;
  return `The page stores only the largest weights. Every other cell has ${mean}.`;
}

/** Return the weight of a cell as text; for a weight that is not listed, what is known about it. */
export function cellText(grid, query, key, name = "") {
  const {matrix, tiles} = grid;
  const names = `${unitName(matrix.queryUnits, query)} → ${unitName(matrix.keyUnits, key)}`;
  const prefix = name ? `${name}, ` : "";
  if (!isVisible(matrix, query, key)) return `${prefix}${names}: not visible`;
  if (matrix.signed) {
    const [a, b] = matrix.parts.map(part => knownWeight(part, query, key));
    const difference = matrix.approximate ? "not exactly known" : formatSigned(weightAt(matrix, query, key));
    return `${prefix}${names}: ${difference} (A ${a}, B ${b})`;
  }
  const isListed = weightAt(matrix, query, key) !== null;
  const average = isListed || !tiles ? null : formatNumber(tileAverage(grid, query, key));
  const around = average === null ? "" : `. The mean weight of the tile around it is ${average}.`;
  return `${prefix}${names}: ${isListed ? "" : "not stored, "}${knownWeight(matrix, query, key)}${around}`;
}

/** Return what is known about a weight: the weight, or a bound of it. */
function knownWeight(matrix, query, key) {
  const weight = weightAt(matrix, query, key);
  if (weight === null) return `at most ${formatAtMost(unlistedBound(matrix, query, key))}`;
  return matrix.exact ? formatWeight(weight) : formatBound(weight);
}
