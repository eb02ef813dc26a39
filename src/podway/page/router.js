// Addresses below /page/ are views; links change the view without loading the page again.

import { html, useEffect, useState } from "./vendor/preact-htm.js";

const BASE = "/page";

export const here = () => decodeURI(location.pathname.slice(BASE.length)) || "/";

export function go(path) {
  if (path !== here() + location.search) history.pushState(null, "", BASE + encodeURI(path));
  dispatchEvent(new PopStateEvent("popstate"));
}

export function useRoute() {
  const [path, set] = useState(here());
  useEffect(() => {
    const moved = () => {
      set(here());
      scrollTo(0, 0);
    };
    addEventListener("popstate", moved);
    return () => removeEventListener("popstate", moved);
  }, []);
  return path;
}

export function Link({ to, children, ...more }) {
  const click = (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    event.preventDefault();
    go(to);
  };
  return html`<a href=${BASE + encodeURI(to)} onClick=${click} ...${more}>${children}</a>`;
}
