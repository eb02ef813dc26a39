// "Launch this": the task of a plan, what it would do and cost, and then the launch of exactly that.

import { html, useRef, useState } from "../vendor/preact-htm.js";
import { request } from "../api.js";
import { go } from "../router.js";
import { Problem, Table } from "../parts/elements.js";
import { dollars } from "../format.js";

// Pure: the command that trains as planned.
export function trainCommand(plan, model) {
  const words = [`model.name=${model}`, `mesh.shape=${plan.mesh}`, `batch.sequences=${plan.batch}`, `batch.length=${plan.seq}`];
  if (plan.microbatches > 1) words.push(`batch.microbatches=${plan.microbatches}`);
  words.push(...rematWords(plan));
  words.push("data.paths='[train.jsonl]'", "schedule.steps=1000", 'output="$HOME/out"');
  return `podway train ${words.join(" \\\n  ")}`;
}

function rematWords(plan) {
  const named = plan.remat.includes("+") || plan.offload.length;
  if (!named) return [`remat.policy=${plan.remat}`];
  const saved = plan.remat === "full" ? [] : plan.remat.split("+");
  return ["remat.policy=custom", `remat.save='[${saved.join(",")}]'`, `remat.offload='[${plan.offload.join(",")}]'`];
}

export function LaunchPlan({ plan, model, spot }) {
  const dialog = useRef(null);
  const [name, setName] = useState("planned");
  const [run, setRun] = useState(() => trainCommand(plan, model));
  const [preview, setPreview] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const body = (more) => ({
    task: { name: "train", run, resources: [{ accelerator: { type: plan.slice, topology: plan.topology }, spot: spot ? "yes" : "no" }] },
    options: { cluster: name },
    ...more,
  });
  const attempt = async (work) => {
    setBusy(true);
    setError(null);
    try {
      await work();
    } catch (problem) {
      setError(problem);
      setPreview(null);
    }
    setBusy(false);
  };
  const look = () => attempt(async () => setPreview(await request("POST", "/v1/preview", body())));
  const launch = () => attempt(async () => {
    const done = await request("POST", "/v1/launch", body({ agreed: preview.digest, request_id: crypto.randomUUID() }));
    go(`/clusters/${done.cluster}${done.job ? `/jobs/${done.job}` : ""}`);
  });
  const change = (set) => (event) => {
    set(event.target.value);
    setPreview(null);
  };
  const chosen = preview && preview.offers.find((one) => one.chosen);
  return html`<div class="buttons"><button onClick=${() => dialog.current.showModal()}>Launch this…</button></div>
    <dialog class="wide" ref=${dialog} aria-label="Launch this plan"><h2>Launch on ${plan.slice}</h2>
      <div class="stack"><label>Cluster<input value=${name} onInput=${change(setName)} /></label>
        <label>What each host runs<textarea class="code-text" rows="9" spellcheck="false" value=${run} onInput=${change(setRun)}></textarea></label></div>
      ${preview ? html`<h3>What it would do</h3>${preview.exists ? html`<p>Queue the job on ${preview.cluster}, which exists.</p>` : html`<${Table} caption="Offers" rows=${preview.offers.slice(0, 6).map((one, key) => ({ ...one, key }))} columns=${[
        { title: "Where", cell: (one) => html`${one.chosen ? html`<b>${[one.provider, one.zone].filter(Boolean).join("/")}</b>` : [one.provider, one.zone].filter(Boolean).join("/")}` },
        { title: "Hosts", cell: (one) => one.hosts, numeric: true }, { title: "Chips", cell: (one) => one.chips, numeric: true },
        { title: "$/h", cell: (one) => dollars(one.hourly_cost), numeric: true }, { title: "", cell: (one) => html`<span class="muted">${one.blocked || one.note}</span>`, minor: true }]} />`}
        ${chosen && chosen.provider === "local" ? html`<p class="muted">This slice is simulated on the server's own machine: only a tiny model trains there.</p>` : null}
        ${preview.notes.map((note) => html`<p class="muted" key=${note}>${note}</p>`)}` : null}
      <${Problem} error=${error} />
      <div class="buttons"><button onClick=${() => dialog.current.close()}>Close</button>
        ${preview ? html`<button class="primary" disabled=${busy} onClick=${launch}>${busy ? "Launching…" : "Launch"}</button>` : html`<button class="primary" disabled=${busy || !name || !run} onClick=${look}>${busy ? "Asking…" : "Show what it would do"}</button>`}</div>
    </dialog>`;
}
