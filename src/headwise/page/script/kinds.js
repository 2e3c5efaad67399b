/** Kinds of heads, and the nouns for what a page shows: the words of a text, the patches of pictures, or both. */

/** Kinds of heads of encoder-decoders, in the order of display, with their short names. */
const SHORT_KINDS = {"encoder self": "enc", "decoder self": "dec"};

/**
 * Return the kind of each head. If the passages have several sides, self-attention is named by its side, or by "encoder"
 * and "decoder" if one of two sides attends to the other. "cross" is attention to another side, which is named by both sides
 * if several pairs of sides have it. If the passages have one side, the module's path may name encoder and decoder.
 */
export function headKinds({models, passages}) {
  const sided = passages.find(passage => passage.sides.length > 1);
  const stored = sided?.heads[0] ?? [];
  const pairs = new Set(stored.flatMap(head => (head && head.queries !== head.keys ? `${head.queries} ${head.keys}` : [])));
  return models[0].heads.map(({kind, module}, place) => {
    const head = stored[place];
    if (kind === "cross" || (head && head.queries !== head.keys)) {
      if (!head || pairs.size < 2) return "cross";
      return `${sided.sides[head.queries].name} to ${sided.sides[head.keys].name} cross`;
    }
    if (head && sided.sides.length === 2 && pairs.size) return head.keys ? "decoder self" : "encoder self";
    if (head) return `${sided.sides[head.keys].name} self`;
    const part = /decoder|encoder/i.exec(module);
    return part ? `${part[0].toLowerCase()} self` : "self";
  });
}

/** Return the different kinds of heads in the order of display: cross-attention last. */
export function differentKinds(kinds) {
  const order = [...Object.keys(SHORT_KINDS), ...kinds];
  const isCross = kind => Number(kind.endsWith("cross"));
  return [...new Set(kinds)].sort((a, b) => isCross(a) - isCross(b) || order.indexOf(a) - order.indexOf(b));
}

/** Return the short name of a kind, such as "enc". */
export function shortKind(kind) {
  return SHORT_KINDS[kind] ?? kind.replace(/ (self|cross)$/, "");
}

/** Return the name of a kind in a sentence, such as "decoder self-attention". */
export function kindTitle(kind) {
  return `${kind}-attention`;
}

/**
 * Return a function that replaces the nouns in a text of the page, which are "word" and "text", by those for what the page
 * shows: patches of pictures, or both words and patches.
 */
export function nounsOf({passages}) {
  const sides = passages.flatMap(passage => passage.sides);
  if (!sides.some(side => side.pictures.length)) return text => text;
  const isPicture = side => side.tokens.every((_, token) => side.special[token] || side.patches[token]);
  return sides.every(isPicture) ? pictureNouns : mixedNouns;
}

function pictureNouns(text) {
  return withPatches(text, "patch", "patches")
    .replace(/\b([Tt])ext(s?)\b/g, (_, letter, plural) => `${letter === "T" ? "P" : "p"}icture${plural}`)
    .replace(/\btokens\b/g, "patches");
}

function mixedNouns(text) {
  return withPatches(text, "word or patch", "words and patches");
}

function withPatches(text, one, many) {
  const replaced = noun => (_, letter) => (letter === "W" ? noun[0].toUpperCase() + noun.slice(1) : noun);
  return text.replace(/\b([Ww])ords\b(?! and patches)/g, replaced(many)).replace(/\b([Ww])ord\b(?! or patch)/g, replaced(one));
}
