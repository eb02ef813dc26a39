// The public API of the server: plain requests, and streams of JSON lines. The session's cookie goes along by itself; requests that
// change something also bring the CSRF token, which another site's page cannot read.

let csrf = "";

export class ApiError extends Error {
  constructor(status, what, hint) {
    super(what);
    this.status = status;
    this.hint = hint || "";
  }
}

export async function request(method, path, body) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (method !== "GET") headers["x-podway-csrf"] = csrf;
  let response;
  try {
    response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new ApiError(0, "The server does not answer.", "It may be restarting; this page tries again by itself.");
  }
  const text = await response.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    /* an answer that is no JSON is an error below */
  }
  if (!response.ok || value === null) {
    const error = (value && value.error) || {};
    throw new ApiError(response.status, error.what || `The server answered ${response.status}.`, error.hint);
  }
  return value;
}

export const get = (path) => request("GET", path);

export async function openSession() {
  const session = await get("/v1/session");
  csrf = session.csrf;
  return session;
}

// The pieces of a streamed answer, cut at `end`; returns when it ends, throws when it breaks.
async function pieces(response, end, onPiece) {
  if (!response.ok || !response.body) {
    let error = {};
    try {
      error = (await response.json()).error || {};
    } catch {
      /* no JSON */
    }
    throw new ApiError(response.status, error.what || `The server answered ${response.status}.`, error.hint);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split(end);
    held = parts.pop();
    for (const part of parts) if (part) onPiece(part);
  }
}

// Lines of a stream, each decoded. `signal` ends it from here.
export const lines = async (path, signal, onLine) => pieces(await fetch(path, { signal }), "\n", (line) => onLine(JSON.parse(line)));

// A request answered by server-sent events, each decoded.
export async function events(path, body, signal, onEvent) {
  const headers = { "content-type": "application/json", "x-podway-csrf": csrf };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  await pieces(response, /\r?\n\r?\n/, (piece) => {
    for (const line of piece.split(/\r?\n/)) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") onEvent(JSON.parse(data));
    }
  });
}

const SILENCE_MS = 50_000; // the stream shows a sign of life every 20 s: a connection that is silent for longer is dead

// Call `onChange` whenever something was written, for as long as the page is open; `onState` hears "live", "away" and "ended".
export function followChanges(onChange, onState) {
  let wait = 500;
  (async () => {
    for (;;) {
      const stop = new AbortController();
      let watch = setTimeout(() => stop.abort(), SILENCE_MS);
      try {
        let first = true;
        await lines("/v1/changes", stop.signal, (frame) => {
          clearTimeout(watch);
          watch = setTimeout(() => stop.abort(), SILENCE_MS);
          if (first) {
            onState("live");
            onChange(); // whatever was missed while away
            wait = 500;
            first = false;
          } else if (frame.changed) onChange();
        });
      } catch (error) {
        if (error.status === 401) return onState("ended");
      }
      clearTimeout(watch);
      onState("away");
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 2, 10000);
    }
  })();
}
