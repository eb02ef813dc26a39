// "Rehearse this": the real TPU compiler on the server, as it goes on, and what it found beside the plan.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { lines, request } from "../api.js";
import { Problem, Table } from "../parts/elements.js";
import { useNow } from "../state.js";
import { big, duration, gib, percent } from "../format.js";

const STAGES = ["waiting", "lowering", "compiling", "reading"];
const SAID = { waiting: "waiting for another rehearsal", lowering: "lowering the step", compiling: "compiling with the TPU compiler", reading: "reading what it wrote", known: "known already" };

export function Rehearsal({ plan, model, config }) {
  const [view, setView] = useState(null);
  const [error, setError] = useState(null);
  const stop = useRef(null);
  const now = useNow(1000);
  useEffect(() => () => stop.current && stop.current.abort(), []);
  const begin = async () => {
    setError(null);
    try {
      const { slice, topology, mesh, batch, microbatches, seq, remat, offload } = plan;
      const body = { model, slice, topology, mesh, batch, microbatches, seq, remat, offload };
      const first = await request("POST", "/v1/rehearsals", config ? { ...body, config } : body);
      setView(first);
      stop.current = new AbortController();
      await lines(`/v1/rehearsals/${first.id}`, stop.current.signal, setView);
    } catch (problem) {
      if (problem.name !== "AbortError") setError(problem);
    }
  };
  const cancel = async () => {
    try {
      setView(await request("DELETE", `/v1/rehearsals/${view.id}`));
    } catch (problem) {
      setError(problem);
    }
  };
  const open = view && view.ended === null;
  const stage = open ? (view.state === "waiting" ? "waiting" : view.stage || "lowering") : "";
  return html`<div class="rehearsal">
    <div class="buttons"><button onClick=${begin} disabled=${open}>${view && !open ? "Rehearse again" : "Rehearse this"}</button>
      ${open ? html`<button class="danger" onClick=${cancel}>Cancel</button>` : null}</div>
    ${open ? html`<div role="status"><progress max=${STAGES.length} value=${Math.max(1, STAGES.indexOf(stage) + 1)} aria-label="Rehearsal"></progress>
      <p class="muted small">${SAID[stage] || stage}, ${duration(Math.max(0, Math.round(now - (view.began || view.asked))))}</p></div>` : null}
    ${view && view.state === "cancelled" ? html`<p class="muted small">Cancelled.</p>` : null}
    ${view && view.state === "failed" ? html`<${Problem} error=${{ message: view.note, hint: "" }} />` : null}
    <${Problem} error=${error} />
    ${view && view.compiled ? html`<${Found} one=${view.compiled} />` : null}
  </div>`;
}

function Found({ one }) {
  if (one.failed && one.bytes === null) return html`<${Problem} error=${{ message: "It does not compile.", hint: one.failed }} />`;
  const rows = [
    { key: "HBM of a chip", planned: one.planned_bytes === null ? "–" : gib(one.planned_bytes), found: `${gib(one.bytes)} of ${gib(one.limit)}` },
    { key: "Step", planned: duration(one.planned_s), found: one.fits ? duration(one.step_s) : "–" },
    { key: "Tokens/s", planned: "", found: one.fits ? big(one.tokens_s) : "–" },
    { key: "MFU", planned: "", found: one.fits ? percent(one.mfu) : "–" },
  ];
  return html`<p class=${one.fits ? "good-text" : "bad-text"}><b>${one.fits ? "It fits." : "It does not fit."}</b> <span class="muted small">libtpu ${one.libtpu}, ${duration(one.compile_s)}</span></p>
    <${Table} caption="What the compiler found" rows=${rows} columns=${[
      { title: "", cell: (row) => row.key }, { title: "Planned", cell: (row) => row.planned, numeric: true }, { title: "Compiled", cell: (row) => row.found, numeric: true }]} />
    ${one.fixes.length ? html`<h3>What would make it fit</h3><ul>${one.fixes.map((fix) => html`<li key=${fix}>${fix}</li>`)}</ul>` : null}
    ${!one.fits ? html`<h3>Largest buffers</h3><${Table} caption="Largest buffers" rows=${one.buffers.map((buffer, key) => ({ ...buffer, key }))} columns=${[
      { title: "Buffer", cell: (row) => row.name }, { title: "Shape", cell: (row) => row.shape, minor: true }, { title: "Size", cell: (row) => gib(row.bytes), numeric: true }]} />` : null}`;
}
