// Addresses below /page/ are views; links change the view without loading the page again.

import { html, useEffect, useState } from "./vendor/preact-htm.js";

const BASE = "/page";

export function here() {
  const path = location.pathname.slice(BASE.length) || "/";
  try {
    return decodeURI(path);
  } catch {
    return path; // a bad escape, which no view has
  }
}

export function go(path) {
  if (path !== here() + location.search) history.pushState(null, "", BASE + encodeURI(path));
  dispatchEvent(new PopStateEvent("popstate"));
}

export function useRoute() {
  const [, set] = useState("");
  useEffect(() => {
    const moved = (event) => {
      set(here() + location.search); // the same view with other choices is drawn again too
      if (!event.isTrusted) scrollTo(0, 0); // back and forward: the browser knows where one was
    };
    addEventListener("popstate", moved);
    return () => removeEventListener("popstate", moved);
  }, []);
  return here();
}

// What stands behind the ? of the address: [values, set(changes)]; a link to a view with its choices can be sent to somebody.
export function useQuery() {
  const [, update] = useState({});
  const values = new URLSearchParams(location.search);
  const set = (changes) => {
    for (const [name, value] of Object.entries(changes)) value ? values.set(name, value) : values.delete(name);
    const text = values.toString().replaceAll("%2F", "/").replaceAll("%2C", ",");
    history.replaceState(null, "", location.pathname + (text ? `?${text}` : ""));
    update({});
  };
  return [values, set];
}

export function Link({ to, children, ...more }) {
  const click = (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    event.preventDefault();
    go(to);
  };
  return html`<a href=${BASE + encodeURI(to)} onClick=${click} ...${more}>${children}</a>`;
}
