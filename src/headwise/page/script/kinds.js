/** Kinds of heads, and the nouns for what a page shows: the words of a text, or the patches of an image. */

/** Kinds of heads in the order of display, with their short names. */
const SHORT_KINDS = {"encoder self": "enc", "decoder self": "dec", self: "self", cross: "cross"};

/**
 * Return the kind of each head: "cross", "encoder self" or "decoder self", or "self" where neither the sides of the
 * passages nor the module's path distinguishes encoder and decoder.
 */
export function headKinds({models, passages}) {
  const sided = passages.find(passage => passage.sides.length === 2);
  return models[0].heads.map(({kind, module}, head) => {
    const stored = sided?.heads[0][head];
    if (kind === "cross" || (stored && stored.queries !== stored.keys)) return "cross";
    if (stored) return stored.keys ? "decoder self" : "encoder self";
    const part = /decoder|encoder/i.exec(module);
    return part ? `${part[0].toLowerCase()} self` : "self";
  });
}

/** Return the different kinds of heads in the order of display. */
export function differentKinds(kinds) {
  return Object.keys(SHORT_KINDS).filter(kind => kinds.includes(kind));
}

/** Return the short name of a kind, such as "enc". */
export function shortKind(kind) {
  return SHORT_KINDS[kind];
}

/** Return the name of a kind in a sentence, such as "decoder self-attention". */
export function kindTitle(kind) {
  return `${kind}-attention`;
}

/** Return true if all passages are images. */
export function showsImages({passages}) {
  return passages.length > 0 && passages.every(passage => passage.sides.every(side => side.image));
}

/** Return a text of the page with the nouns for an image. */
export function imageNouns(text) {
  return text
    .replace(/\b([Ww])ords\b/g, (_, letter) => (letter === "W" ? "Patches" : "patches"))
    .replace(/\b([Ww])ord\b/g, (_, letter) => (letter === "W" ? "Patch" : "patch"))
    .replace(/\b([Tt])ext(s?)\b/g, (_, letter, plural) => `${letter === "T" ? "I" : "i"}mage${plural}`)
    .replace(/\btokens\b/g, "patches");
}
