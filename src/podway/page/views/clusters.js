// Every cluster, and one of them: hosts, jobs, history, attempts, and what can be done with it.

import { html, useState } from "../vendor/preact-htm.js";
import { request } from "../api.js";
import { refresh, useApi, useNow } from "../state.js";
import { Link, go } from "../router.js";
import { Action, Card, Code, Empty, Loaded, State, Table, useTitle } from "../parts/elements.js";
import { Torus } from "../parts/torus.js";
import { ago, clock, dollars, duration, mib } from "../format.js";

export function Clusters() {
  useTitle("Clusters");
  const now = useNow(5000);
  const [gone, setGone] = useState(false);
  const all = useApi(gone ? "/v1/clusters?past=1" : "/v1/clusters");
  return html`<div class="heading"><h1>Clusters</h1><label class="check"><input type="checkbox" checked=${gone} onChange=${(event) => setGone(event.target.checked)} /> Including deleted ones</label></div>
  <${Card}>
    <${Loaded} from=${all}>${(value) => value.clusters.length ? html`<${Table} caption="Clusters" rows=${value.clusters.slice().reverse().map((one) => ({ ...one, key: one.id }))}
      onOpen=${(one) => go(`/clusters/${one.name}`)} columns=${[
        { title: "Name", cell: (one) => html`<${Link} to=${`/clusters/${one.name}`}>${one.name}</${Link}>` },
        { title: "State", cell: (one) => html`<${State} state=${one.state} />` },
        { title: "Where", cell: (one) => one.infra, minor: true },
        { title: "Resources", cell: (one) => one.resources, minor: true },
        { title: "Owner", cell: (one) => one.user, minor: true },
        { title: "Jobs", cell: (one) => one.open_jobs, numeric: true },
        { title: "$/h", cell: (one) => dollars(one.hourly_cost), numeric: true },
        { title: "Spent", cell: (one) => dollars(one.cost), numeric: true },
        { title: "Created", cell: (one) => ago(one.created, now), minor: true },
      ]} />` : html`<${Empty} title="No clusters"><${Code}>podway launch -c demo --tpus v6e-16 'hostname'</${Code}></${Empty}>`}</${Loaded}>
  </${Card}>`;
}

const SOME = 500; // jobs that are asked for again whenever one changes
const USAGE_S = 10;
const ASKED = 64; // hosts: more are not asked for their use

// Every host by rank: whether it answers, and what the running job uses there.
function Hosts({ one, jobs, path }) {
  const running = jobs && one.state === "UP" && one.hosts.length <= ASKED ? jobs.jobs.find((job) => job.state === "RUNNING") : null;
  const used = useApi(running ? `${path}/jobs/${running.number}/usage` : null, USAGE_S);
  const ranks = new Map(((used.value && used.value.ranks) || []).map((rank) => [rank.rank, rank]));
  const silent = running && used.error && used.error.status;
  return html`<${Card} title=${`Hosts (${one.hosts.length})`} aside=${running ? html`<span class="muted small">memory and processes of job ${running.number}</span>` : null}>
    ${one.order.topology ? html`<${Torus} topology=${one.order.topology} hosts=${one.order.hosts_per_slice || 1} perHost=${one.order.chips_per_host || 1} />` : null}
    ${one.hosts.length ? html`<ol class="hosts">${one.hosts.map((host) => {
      const use = ranks.get(host.rank);
      return html`<li key=${host.id} class=${one.state !== "UP" ? "idle" : silent ? "bad" : "good"} title=${`rank ${host.rank}, slice ${host.slice}, worker ${host.worker}, ${host.address}`}>
        <b>${host.rank}</b><span>${host.address}</span>${running ? html`<span class="tabular">${use ? `${mib(use.rss)}, ${use.processes}` : silent ? "no answer" : "…"}</span>` : null}</li>`;
    })}</ol>` : html`<p class="muted">No hosts now.</p>`}
    ${silent ? html`<p class="muted small">${used.error.message}</p>` : null}
  </${Card}>`;
}

export function ClusterView({ name, session }) {
  useTitle(name);
  const now = useNow(5000);
  const path = `/v1/clusters/${encodeURIComponent(name)}`;
  const cluster = useApi(path);
  const [every, setEvery] = useState(false);
  const jobs = useApi(`${path}/jobs?limit=${every ? 100000 : SOME}`);
  const events = useApi(`${path}/events`);
  const act = (method, where, body) => async () => {
    await request(method, where, body);
    refresh((one) => one.startsWith("/v1/clusters"));
  };
  return html`<${Loaded} from=${cluster}>${(one) => html`
    <div class="heading"><h1>${one.name} <${State} state=${one.state} /></h1>
      ${session.role === "viewer" || one.state === "GONE" ? null : html`<div class="buttons">
        <${Action} label="Autostop" confirm="Set it" question=${`Take ${one.name} down once it has been idle for 30 minutes?`} act=${act("POST", `${path}/autostop`, { autostop: { idle_minutes: 30, down: true } })} />
        ${one.state === "STOPPED" ? html`<${Action} key="start" label="Start" question=${`Start ${one.name}?`} act=${act("POST", `${path}/start`)} />`
          : html`<${Action} key="stop" label="Stop" question=${`Stop the hosts of ${one.name} and keep their disks? Jobs that run are cancelled.`} act=${act("POST", `${path}/stop`)} />`}
        <${Action} label="Take down" danger=${true} question=${`Delete ${one.name} and everything it made? Jobs that run are cancelled.`} act=${act("DELETE", path)} />
      </div>`}</div>
    ${one.reason ? html`<p class="muted">${one.reason}</p>` : null}
    <div class="columns">
      <${Card} title="Resources">
        <dl class="facts">
          <dt>Slices</dt><dd>${one.resources}</dd><dt>Where</dt><dd>${one.infra}</dd><dt>Owner</dt><dd>${one.user}</dd>
          <dt>Created</dt><dd title=${clock(one.created)}>${ago(one.created, now)}</dd><dt>Up for</dt><dd>${one.up_since ? duration(now - one.up_since) : "–"}</dd>
          <dt>Cost</dt><dd>${dollars(one.cost)} <span class="muted">${dollars(one.hourly_cost)}/h</span></dd>
          <dt>Autostop</dt><dd>${one.autostop ? `${one.autostop.down ? "down" : "stop"} after ${one.autostop.idle_minutes} idle min` : "off"}</dd></dl>
      </${Card}>
      <${Hosts} one=${one} jobs=${jobs.value} path=${path} />
    </div>
    <${Card} title="Jobs" aside=${jobs.value && jobs.value.jobs.length >= SOME && !every ? html`<button class="quiet" onClick=${() => setEvery(true)}>Show older ones too</button>` : null}>${html`<${Loaded} from=${jobs}>${(value) => value.jobs.length ? html`<${Table} caption="Jobs" rows=${value.jobs.slice().reverse().map((job) => ({ ...job, key: job.number }))}
      onOpen=${(job) => go(`/clusters/${name}/jobs/${job.number}`)} columns=${[
        { title: "Job", cell: (job) => html`<${Link} to=${`/clusters/${name}/jobs/${job.number}`}>${job.number}</${Link}>` },
        { title: "Name", cell: (job) => job.name || "–" },
        { title: "State", cell: (job) => html`<${State} state=${job.state} />` },
        { title: "Owner", cell: (job) => job.user, minor: true },
        { title: "Submitted", cell: (job) => ago(job.submitted, now), minor: true },
        { title: "Ran for", cell: (job) => (job.started ? duration((job.ended || now) - job.started) : "–"), numeric: true },
        { title: "Why", cell: (job) => html`<span class="muted">${job.reason}</span>`, minor: true },
      ]} />` : html`<${Empty} title="No jobs yet"><${Code}>podway exec ${name} 'hostname'</${Code}></${Empty}>`}</${Loaded}>`}</${Card}>
    ${one.attempts.length ? html`<${Card} title="Attempts to get hosts"><${Table} caption="Attempts" rows=${one.attempts.map((attempt, index) => ({ ...attempt, key: index }))} columns=${[
      { title: "Where", cell: (attempt) => [attempt.provider, attempt.zone].filter(Boolean).join("/") },
      { title: "Type", cell: (attempt) => `${attempt.accelerator_type || "CPU"}${attempt.spot ? " spot" : ""}` },
      { title: "Outcome", cell: (attempt) => html`<span class=${`state ${{ up: "good", failed: "bad", lost: "warn" }[attempt.outcome] || "busy"}`}>${attempt.outcome}</span>` },
      { title: "Began", cell: (attempt) => ago(attempt.begun, now) },
      { title: "Lasted", cell: (attempt) => (attempt.ended ? duration(attempt.ended - attempt.begun) : "–"), numeric: true },
      { title: "Why", cell: (attempt) => html`<span class="muted">${attempt.reason}</span>` },
    ]} /></${Card}>` : null}
    <${Card} title="History">${html`<${Loaded} from=${events}>${(value) => html`<ol class="timeline">${value.events.slice(-200).reverse().map((event) => html`
      <li key=${event.id} class=${`event-${event.kind}`}><time title=${clock(event.time)}>${new Date(event.time * 1000).toLocaleTimeString()}</time>
        ${event.job ? html`<${Link} to=${`/clusters/${name}/jobs/${event.job}`}>job ${event.job}</${Link}> ` : null}<span>${event.text}</span></li>`)}</ol>`}</${Loaded}>`}</${Card}>`}</${Loaded}>`;
}
