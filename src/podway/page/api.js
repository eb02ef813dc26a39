// The public API of the server: plain requests, and streams of JSON lines. The session's cookie goes along by itself; requests that
// change something also bring the CSRF token, which another site's page cannot read.

const GIVEN_UP_MS = 60_000; // of a read: a connection may be dead without anybody saying so, as after a laptop's sleep

let csrf = "";
let user = "";
let ended = () => {};

// Hear of the end of the session, whichever request finds out.
export const onEnded = (listener) => (ended = listener);

export class ApiError extends Error {
  constructor(status, what, hint, code) {
    super(what);
    this.status = status;
    this.code = code || "";
    this.hint = hint || "";
  }
}

// A change sent with the token of an earlier session (this browser logged in once more, in another tab) is sent again with the new one.
async function again(attempt) {
  try {
    return await attempt();
  } catch (error) {
    if (error.code !== "other_session") throw error;
    await openSession();
    return attempt();
  }
}

export const request = (method, path, body) => again(() => send(method, path, body));

async function send(method, path, body) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (method !== "GET") headers["x-podway-csrf"] = csrf;
  let response;
  try {
    const signal = method === "GET" ? AbortSignal.timeout(GIVEN_UP_MS) : undefined;
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new ApiError(0, "The server does not answer.", "It may be restarting; this page tries again by itself.");
  }
  let text = "";
  let value = null;
  try {
    text = await response.text();
    value = text ? JSON.parse(text) : null;
  } catch {
    /* an answer that broke off or is no JSON is an error below */
  }
  if (response.status === 401) ended();
  if (!response.ok || value === null) {
    const error = (value && value.error) || {};
    throw new ApiError(response.ok ? 0 : response.status, error.what || `The server answered ${response.status}.`, error.hint, error.code);
  }
  return value;
}

export const get = (path) => request("GET", path);

export async function openSession() {
  const session = await get("/v1/session");
  if (user && session.user !== user) {
    location.reload(); // nothing on the screen is theirs, and nothing that was clicked on it
    throw new ApiError(403, `${session.user} has logged in here.`, "");
  }
  ({ csrf, user } = session);
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
    if (response.status === 401) ended();
    throw new ApiError(response.status, error.what || `The server answered ${response.status}.`, error.hint, error.code);
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

// A request answered by server-sent events, each decoded; whether the stream said that it was whole.
export const events = (path, body, signal, onEvent) => again(() => sendForEvents(path, body, signal, onEvent));

async function sendForEvents(path, body, signal, onEvent) {
  const headers = { "content-type": "application/json", "x-podway-csrf": csrf };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  let whole = false;
  await pieces(response, /\r?\n\r?\n/, (piece) => {
    for (const line of piece.split(/\r?\n/)) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") whole = true;
      else if (data) onEvent(JSON.parse(data));
    }
  });
  return whole;
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
