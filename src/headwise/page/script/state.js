/** State of the page, which is kept in the address, so that a link restores it. */

/** All settings with their default values. */
export const DEFAULTS = Object.freeze({
  passage: 0,
  model: "A",
  head: "",
  pin: "",
  direction: "from",
  words: true,
  special: false,
  first: false,
  generated: false,
  theme: "system",
  colour: "role",
  group: "role",
  sort: "",
  search: "",
  roles: [],
  layers: "",
  kind: "",
  range: "",
  from: "",
  to: "",
  changed: false,
  scale: "root",
  tray: [],
  marking: false,
  marks: "",
  focus: "received",
  start: 0,
  opacity: 75,
});

/** Return the settings that differ from the defaults as the hash of an address, without "#". */
export function hashOf(values, defaults = DEFAULTS) {
  const parameters = new URLSearchParams();
  for (const [name, initial] of Object.entries(defaults)) {
    const text = Array.isArray(initial) ? values[name].join(" ") : String(values[name]);
    if (text !== (Array.isArray(initial) ? "" : String(initial))) parameters.set(name, text);
  }
  return parameters.toString();
}

/** Return the settings of a hash; unknown names and malformed values are ignored. */
export function valuesOfHash(hash, defaults = DEFAULTS) {
  const values = {...defaults};
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!Object.hasOwn(defaults, name)) continue;
    const initial = defaults[name];
    if (Array.isArray(initial)) values[name] = text.split(" ").filter(Boolean);
    else if (typeof initial === "boolean") values[name] = text === "true";
    else if (typeof initial === "number") values[name] = /^\d+$/.test(text) ? Number(text) : initial;
    else values[name] = text;
  }
  return values;
}

/** Call a listener and report its error, so that the other listeners run. */
function call(listener, ...parameters) {
  try {
    listener(...parameters);
  } catch (error) {
    reportError(error);
  }
}

/**
 * Return the state: get(name), set(changes), and on(names, listener), which is called
 * after one of the names changed, and onRestore(listener), which is called after a link restored all settings.
 *
 * @param hash hash of the address
 * @param writeHash function that is called with each new hash
 * @param opening settings whose defaults are those of this page
 */
export function createState(hash, writeHash, opening = {}) {
  const defaults = valuesOfHash(String(new URLSearchParams(opening)));
  let values = valuesOfHash(hash, defaults);
  const listeners = [];
  const restoreListeners = [];
  const same = (a, b) => (Array.isArray(a) ? a.join(" ") === b.join(" ") : a === b);

  function change(next) {
    const changed = Object.keys(DEFAULTS).filter(name => !same(values[name], next[name]));
    values = next;
    if (!changed.length) return;
    writeHash(hashOf(values, defaults));
    for (const {names, listener} of listeners) if (changed.some(name => names.includes(name))) call(listener, changed);
  }

  return {
    get: name => values[name],
    set: changes => change({...values, ...changes}),
    restore: text => {
      change(valuesOfHash(text, defaults));
      for (const listener of restoreListeners) call(listener);
    },
    onRestore: listener => {
      restoreListeners.push(listener);
    },
    on: (names, listener) => {
      listeners.push({names, listener});
    },
  };
}

/**
 * Return the state of this window, with the settings in which the page opens as defaults. A window that may not change its
 * address keeps the state in memory only.
 */
export function windowState(view, opening) {
  let written = view.location.hash.replace(/^#/, "");
  const write = hash => {
    written = hash;
    try {
      view.history.replaceState(null, "", `#${hash}`);
    } catch {
      // A sandboxed frame without an address of its own forbids this.
    }
  };
  const state = createState(written, write, opening);
  view.addEventListener("hashchange", () => {
    const hash = view.location.hash.replace(/^#/, "");
    if (hash !== written) state.restore(hash);
  });
  return state;
}
