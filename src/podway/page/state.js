// What the page knows: loaded values by path, shared by all views, loaded again when the server says that something changed.

import { useEffect, useState } from "./vendor/preact-htm.js";
import { get } from "./api.js";

const AGAIN_MS = 2000;
const KEPT_MS = 10000; // what no view shows: the next view may, and need not begin empty
const kept = new Map(); // path -> {value, error, listeners, timer, loading}

function slot(path) {
  if (!kept.has(path)) kept.set(path, { value: undefined, error: null, listeners: new Set(), loading: false, again: false });
  return kept.get(path);
}

async function load(path) {
  const one = slot(path);
  if (one.loading) {
    one.again = true;
    return;
  }
  one.loading = true;
  try {
    one.value = await get(path);
    one.error = null;
  } catch (error) {
    one.error = error;
    if (!error.status) setTimeout(() => one.listeners.size && load(path), AGAIN_MS); // the server, or the way to it, is away
  }
  one.loading = false;
  for (const listener of one.listeners) listener({});
  if (one.again) {
    one.again = false;
    load(path);
  }
}

function forget(path, one) {
  if (!one.listeners.size && kept.get(path) === one) kept.delete(path);
}

// The value at a path of the API: {value, error}; `value` is undefined until it is there. With `every`, asked again after so many
// seconds: only for what no stream tells of.
export function useApi(path, every = 0) {
  const [, update] = useState({});
  useEffect(() => {
    if (!path) return undefined;
    const one = slot(path);
    one.listeners.add(update);
    load(path);
    const timer = every ? setInterval(() => document.hidden || load(path), every * 1000) : 0;
    return () => {
      clearInterval(timer);
      one.listeners.delete(update);
      if (one.value === undefined) forget(path, one);
      else setTimeout(() => forget(path, one), KEPT_MS);
    };
  }, [path, every]);
  const one = path ? kept.get(path) : null;
  return { value: one ? one.value : undefined, error: one ? one.error : null };
}

// Load again what is on the screen.
export function refresh(matching = () => true) {
  for (const [path, one] of kept) if (one.listeners.size && matching(path)) load(path);
}

// The time, moving while it is looked at.
export function useNow(every = 1000) {
  const [now, set] = useState(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => set(Date.now() / 1000), every);
    return () => clearInterval(timer);
  }, [every]);
  return now;
}
