// Small pieces that every view is made of.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { ApiError } from "../api.js";

const TONES = {
  UP: "good", RUNNING: "good", READY: "good", SUCCEEDED: "good", FREE: "good", BUSY: "good",
  INIT: "busy", SETTING_UP: "busy", STARTING: "busy", PROVISIONING: "busy", NOT_READY: "warn", DRAINING: "warn", SHUTTING_DOWN: "warn", NO_REPLICA: "idle", PENDING: "idle", RECOVERING: "warn", CANCELLING: "warn", STOPPING: "warn", TERMINATING: "warn", LEAVING: "warn",
  STOPPED: "idle", GONE: "idle", CANCELLED: "idle",
  FAILED: "bad", FAILED_SETUP: "bad", FAILED_DRIVER: "bad", FAILED_NO_RESOURCE: "bad", BROKEN: "bad",
};

export const State = ({ state }) =>
  html`<span class="state ${TONES[state] || "idle"}">${state.replaceAll("_", " ").toLowerCase()}</span>`;

export const Empty = ({ title, children }) => html`<div class="empty"><h3>${title}</h3>${children}</div>`;

export const Code = ({ children, block }) => {
  const text = [children].flat().join("");
  const [copied, set] = useState(false);
  const code = useRef(null);
  const copy = async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else {
      getSelection().selectAllChildren(code.current); // over plain http to another machine there is no clipboard
      document.execCommand("copy");
    }
    set(true);
    setTimeout(() => set(false), 1500);
  };
  return html`<div class=${block ? "code block" : "code"}>${block ? html`<pre tabindex="0"><code ref=${code}>${text}</code></pre>` : html`<code tabindex="0" ref=${code}>${text}</code>`}
    <button class="quiet" onClick=${copy} aria-label=${copied ? "Copied" : "Copy"}>${copied ? "Copied" : "Copy"}</button></div>`;
};

export const Problem = ({ error }) =>
  error ? html`<div class="problem" role="alert"><strong>${error.message}</strong>${error.hint ? html`<span>${error.hint}</span>` : null}</div>` : null;

export const Loading = () => html`<div class="loading" aria-busy="true"><span class="visually-hidden">Loading…</span></div>`;

// A value of the API: the view of it once it is there.
export const Loaded = ({ from, children }) =>
  from.value !== undefined ? html`<${Problem} error=${from.error && from.error.status ? from.error : null} />${children(from.value)}`
    : from.error ? html`<${Problem} error=${from.error} />` : html`<${Loading} />`;

export const Card = ({ title, aside, children, ...more }) =>
  html`<section class="card" ...${more}>${title ? html`<header><h2>${title}</h2>${aside || null}</header>` : null}${children}</section>`;

export const Figure = ({ label, value, note }) =>
  html`<div class="figure"><span class="label">${label}</span><span class="value">${value}</span>${note ? html`<span class="note">${note}</span>` : null}</div>`;

const FEW = 200; // rows that are all drawn
const ROW = 37; // pixels, of a row in a long table: as in style.css
const AROUND = 12;

// Rows with columns {title, cell(row), numeric, minor}; minor columns go first where the screen is narrow. Of a long table only the
// rows on the screen are elements.
export function Table({ rows, columns, caption, onOpen }) {
  const box = useRef(null);
  const [top, setTop] = useState(0);
  const [wide, setWide] = useState(false);
  useEffect(() => {
    const look = new ResizeObserver(() => setWide(box.current.scrollWidth > box.current.clientWidth));
    look.observe(box.current);
    return () => look.disconnect();
  }, []);
  const long = rows.length > FEW;
  const first = long ? Math.max(0, Math.floor(top / ROW) - AROUND) : 0;
  const last = long ? Math.min(rows.length, first + Math.ceil(640 / ROW) + 2 * AROUND) : rows.length;
  const classes = (one) => `${one.numeric ? "numeric" : ""} ${one.minor ? "minor" : ""}`;
  const space = (count) => (count ? html`<tr class="space" aria-hidden="true"><td colspan=${columns.length} ref=${(cell) => cell && (cell.style.height = `${count * ROW}px`)}></td></tr>` : null);
  return html`
  <div class=${long ? "table long" : "table"} ref=${box} ...${long || wide ? { tabindex: "0", role: "region", "aria-label": caption } : {}}
    onScroll=${long ? () => setTop(box.current.scrollTop) : null}><table aria-rowcount=${long ? rows.length : null}>
    <caption class="visually-hidden">${caption}</caption>
    <thead><tr>${columns.map((one) => html`<th scope="col" class=${classes(one)}>${one.title || html`<span class="visually-hidden">Choose</span>`}</th>`)}</tr></thead>
    <tbody>${space(first)}${rows.slice(first, last).map((row) => html`
      <tr key=${row.key} class=${onOpen ? "opens" : ""} onClick=${onOpen ? (event) => event.target.closest("a,button,input") || onOpen(row) : null}>
        ${columns.map((one) => html`<td class=${classes(one)}>${one.cell(row)}</td>`)}
      </tr>`)}${space(rows.length - last)}</tbody>
  </table></div>`;
}

// A button that asks before it acts, and says what came of it.
export function Action({ label, question, confirm, danger, act, onOpen, children }) {
  const dialog = useRef(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const run = async () => {
    setBusy(true);
    setError(null);
    try {
      await act();
      if (dialog.current) dialog.current.close(); // the view may have gone with what it showed
    } catch (problem) {
      setError(problem instanceof ApiError ? problem : new ApiError(0, String(problem.message || problem), ""));
    }
    setBusy(false);
  };
  return html`
    <button class=${danger ? "danger" : ""} onClick=${() => { setError(null); if (onOpen) onOpen(); dialog.current.showModal(); }}>${label}</button>
    <dialog ref=${dialog} aria-label=${label}>
      <p>${question}</p>
      ${children || null}
      <${Problem} error=${error} />
      <div class="buttons">
        <button onClick=${() => dialog.current.close()}>Keep it</button>
        <button class=${danger ? "danger" : "primary"} disabled=${busy} onClick=${run}>${busy ? "Working…" : confirm || label}</button>
      </div>
    </dialog>`;
}

export function useTitle(title) {
  useEffect(() => {
    document.title = title ? `${title} · Podway` : "Podway";
  }, [title]);
}
