// Every pool, and one of them: its workers, each a cluster, and the jobs that they have had, have and will have.

import { html } from "../vendor/preact-htm.js";
import { request } from "../api.js";
import { refresh, useApi, useNow } from "../state.js";
import { Link, go } from "../router.js";
import { Action, Card, Code, Empty, Figure, Loaded, State, Table, useTitle } from "../parts/elements.js";
import { ago, clock } from "../format.js";

const SHOWN = 200; // jobs that the server tells of a pool
const LOOK_S = 5; // jobs that wait for a worker are in no stream
const ready = (pool) => pool.workers.filter((one) => one.state === "free" || one.state === "busy").length;
const kind = (pool) => (pool.slices > 1 ? `${pool.slices}× ` : "") + (pool.accelerators.join(" or ") || "CPU hosts");
const size = ({ workers, max_workers }) => (workers === max_workers ? "fixed" : `${workers} to ${max_workers}, as jobs need them`);
const state = (pool) => (pool.leaving ? "LEAVING" : pool.workers.some((one) => one.state === "broken") ? "BROKEN" : ready(pool) ? "READY" : pool.workers.length ? "STARTING" : "IDLE");
const OPEN = new Set(["PENDING", "SETTING_UP", "RUNNING", "RECOVERING", "CANCELLING"]);

export function Pools() {
  useTitle("Pools");
  const now = useNow(5000);
  const all = useApi("/v1/pools", LOOK_S);
  return html`<div class="heading"><h1>Pools</h1></div><${Card}><${Loaded} from=${all}>${(value) => (value.pools.length ? html`<${Table} caption="Pools" rows=${value.pools.map((one) => ({ ...one, key: one.name }))}
    onOpen=${(one) => go(`/pools/${one.name}`)} columns=${[
      { title: "Name", cell: (one) => html`<${Link} to=${`/pools/${one.name}`}>${one.name}</${Link}>` },
      { title: "State", cell: (one) => html`<${State} state=${state(one)} />` },
      { title: "Each worker", cell: kind, minor: true },
      { title: "Owner", cell: (one) => one.user, minor: true },
      { title: "Workers ready", cell: (one) => `${ready(one)} of ${one.workers.length}`, numeric: true },
      { title: "Jobs waiting", cell: (one) => one.waiting, numeric: true },
      { title: "Created", cell: (one) => ago(one.created, now), minor: true },
    ]} />` : html`<${Empty} title="No pools"><p>A pool keeps workers up, and each job that is given to it runs on a free one: for many jobs that are alike.</p>
      <${Code}>podway pool apply -p demo pool.yaml</${Code}></${Empty}>`)}</${Loaded}></${Card}>`;
}

export function PoolView({ name, session }) {
  useTitle(name);
  const now = useNow(5000);
  const path = `/v1/pools/${encodeURIComponent(name)}`;
  const pool = useApi(path, LOOK_S);
  const act = (method, where, body, then) => async () => {
    await request(method, where, body);
    refresh((one) => one.startsWith("/v1/pools"));
    if (then) then();
  };
  const may = session.role !== "viewer";
  return html`<${Loaded} from=${pool}>${(one) => {
    const open = one.jobs.filter((job) => OPEN.has(job.state));
    return html`<div class="heading"><h1>${one.name} <${State} state=${state(one)} /></h1>
      ${may && !one.leaving ? html`<div class="buttons">${open.length ? html`<${Action} key="cancel" label="Cancel all jobs" danger=${true} question=${`Cancel every job of ${one.name} that has not ended?`} act=${act("POST", `${path}/cancel`, { jobs: [] })} />` : null}
        <${Action} key="down" label="Take down" danger=${true} question=${`Delete ${one.name}, its workers and the jobs on them?`} act=${act("DELETE", path, undefined, () => go("/pools"))} /></div>` : null}</div>
    ${one.reason ? html`<p class="muted">${one.reason}</p>` : null}
    <div class="figures">
      <${Figure} label="Workers ready" value=${`${ready(one)} of ${one.workers.length}`} note=${size(one.size)} />
      <${Figure} label="Jobs on workers" value=${one.workers.filter((worker) => worker.job !== null).length} note="one for each worker" />
      <${Figure} label="Jobs waiting" value=${one.waiting} note="for a free worker" />
      <${Figure} label="Each worker" value=${kind(one)} note=${`revision ${one.revision}`} />
      <${Figure} label="Created" value=${ago(one.created, now)} note=${`by ${one.user}`} />
    </div>
    <${Card} title="Workers">${one.workers.length ? html`<${Table} caption="Workers" rows=${one.workers.map((worker) => ({ ...worker, key: worker.number }))} columns=${[
      { title: "Worker", cell: (worker) => html`<${Link} to=${`/clusters/${worker.cluster}`}>${worker.cluster}</${Link}>` },
      { title: "State", cell: (worker) => html`<${State} state=${worker.state.toUpperCase()} />${worker.outdated ? html` <span class="muted small">goes when its job has ended</span>` : null}` },
      { title: "Job of the pool", cell: (worker) => worker.job ?? "–" },
    ]} />` : html`<p class="muted">No workers now.</p>`}</${Card}>
    <${Card} title="Jobs" aside=${one.jobs.length >= SHOWN ? html`<span class="muted small">the latest ${SHOWN}</span>` : null}>${one.jobs.length ? html`<${Table} caption="Jobs" rows=${one.jobs.slice().reverse().map((job) => ({ ...job, key: job.number }))} columns=${[
      { title: "Job", cell: (job) => (job.cluster && job.job ? html`<${Link} to=${`/clusters/${job.cluster}/jobs/${job.job}`}>${job.number}</${Link}>` : job.number) },
      { title: "Name", cell: (job) => job.name || "–", minor: true },
      { title: "State", cell: (job) => html`<${State} state=${job.state} />` },
      { title: "Worker", cell: (job) => (job.cluster ? html`<${Link} to=${`/clusters/${job.cluster}`}>${job.cluster}</${Link}>` : "–") },
      { title: "Owner", cell: (job) => job.user, minor: true },
      { title: "Submitted", cell: (job) => html`<span title=${clock(job.submitted)}>${ago(job.submitted, now)}</span>`, minor: true },
      ...(one.jobs.some((job) => job.reason) ? [{ title: "Why", cell: (job) => html`<span class="muted">${job.reason}</span>`, minor: true }] : []),
      { title: "", cell: (job) => (may && OPEN.has(job.state) && job.state !== "CANCELLING" ? html`<${Action} label="Cancel" danger=${true} question=${`Cancel job ${job.number} of ${one.name}?`} confirm="Cancel the job" act=${act("POST", `${path}/cancel`, { jobs: [job.number] })} />` : null), numeric: true },
    ]} />` : html`<${Empty} title="No jobs yet"><${Code}>podway launch --pool ${one.name} job.yaml</${Code}></${Empty}>`}</${Card}>`;
  }}</${Loaded}>`;
}
