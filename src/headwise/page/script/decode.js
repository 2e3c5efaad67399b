/** Decoding of the page's data: base64, gzip, angular weights, rows and visible keys. */

/** Return the bytes of a base64 text. */
export function bytesOfBase64(text) {
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** Return the decompressed content of gzip bytes as an ArrayBuffer. */
export async function gunzip(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const angularTables = new Map();

/** Return the weights of all angular codes from 0 to `levels`: sin²(code / levels · π / 2). */
export function angularTable(levels) {
  if (!angularTables.has(levels)) {
    angularTables.set(
      levels,
      Float32Array.from({length: levels + 1}, (_, code) => Math.sin(((code / levels) * Math.PI) / 2) ** 2),
    );
  }
  return angularTables.get(levels);
}

/** Return a function that reads the next numbers of a buffer, which need not be aligned. */
function reader(buffer) {
  let offset = 0;
  return (Type, length) => {
    const bytes = length * Type.BYTES_PER_ELEMENT;
    if (offset + bytes > buffer.byteLength) throw new RangeError("The data of the page are incomplete.");
    const numbers = new Type(buffer.slice(offset, offset + bytes));
    offset += bytes;
    return numbers;
  };
}

/** Return n + 1 offsets from n counts: entry i is the sum of the first i counts. */
export function offsetsOf(counts) {
  const offsets = new Int32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) offsets[i + 1] = offsets[i] + counts[i];
  return offsets;
}

/** Read the rows of a head that are stored completely. */
export function parseDense(buffer, queries, keys) {
  return {exact: true, queries, keys, codes: reader(buffer)(Uint16Array, queries * keys)};
}

/** Read the rows of a head of which only the largest weights are stored, with the total of each row. */
export function parseSparse(buffer, queries, keys) {
  const read = reader(buffer);
  const entries = read(Int32Array, 1)[0];
  const start = offsetsOf(read(Uint16Array, queries));
  const totalCodes = read(Uint16Array, queries);
  const key = read(keys > 65536 ? Uint32Array : Uint16Array, entries);
  const codes = read(Uint8Array, entries);
  const table = angularTable(65535);
  return {exact: false, queries, keys, start, key, codes, totals: Float32Array.from(totalCodes, code => table[code])};
}

/** Read the runs of visible keys of each query. Run r of query q: first[q] <= r < first[q + 1]. */
export function parseVisibility(buffer, queries) {
  const read = reader(buffer);
  const runs = read(Int32Array, 1)[0];
  const first = offsetsOf(read(Uint16Array, queries));
  return {first, start: read(Uint32Array, runs), stop: read(Uint32Array, runs)};
}

/** Return the number of keys from `from` up to, but not including, `to` that are visible to a query. */
export function visibleKeys(visibility, query, from = 0, to = Infinity) {
  let count = 0;
  for (let run = visibility.first[query]; run < visibility.first[query + 1]; run++) {
    count += Math.max(0, Math.min(to, visibility.stop[run]) - Math.max(from, visibility.start[run]));
  }
  return count;
}
