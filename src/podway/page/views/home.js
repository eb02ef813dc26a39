// What is up, what it costs, and what needs somebody's attention.

import { html } from "../vendor/preact-htm.js";
import { useApi, useNow } from "../state.js";
import { Link } from "../router.js";
import { Card, Code, Empty, Figure, Loaded, State, Table, useTitle } from "../parts/elements.js";
import { ago, dollars, duration } from "../format.js";

const IDLE_S = 30 * 60;
const STUCK_S = 30 * 60;

const RECENT_S = 86400;

// Pure: what a person should look at, the worst first.
export function attention(clusters, orphans, runs, now) {
  const found = [];
  if (orphans) found.push({ key: "orphans", tone: "bad", what: `${orphans} cloud resource${orphans === 1 ? "" : "s"} that no cluster accounts for`, hint: "podway status --orphans", to: null });
  for (const one of clusters) {
    if (one.state === "INIT" && now - one.created > STUCK_S) found.push({ key: one.id, tone: "warn", what: `${one.name} waits for capacity`, hint: one.reason || `for ${duration(now - one.created)}`, to: `/clusters/${one.name}` });
    if (one.recovering) found.push({ key: one.id + "r", tone: "warn", what: `${one.name} lost its hosts and waits for new ones`, hint: one.reason, to: `/clusters/${one.name}` });
    if (one.state === "UP" && !one.open_jobs && one.hourly_cost && !one.autostop && now - (one.up_since || now) > IDLE_S)
      found.push({ key: one.id + "i", tone: "warn", what: `${one.name} is idle and costs ${dollars(one.hourly_cost)}/h`, hint: "take it down, or set autostop", to: `/clusters/${one.name}` });
  }
  for (const run of runs)
    if (run.state.startsWith("FAILED") && now - (run.ended || now) < RECENT_S && clusters.some((one) => one.name === run.cluster))
      found.push({ key: `${run.cluster}/${run.job}`, tone: "bad", what: `${run.name || "job"} ${run.cluster}/${run.job} failed`, hint: ago(run.ended, now), to: `/clusters/${run.cluster}/jobs/${run.job}` });
  return found;
}

export function Home() {
  useTitle("");
  const now = useNow(5000);
  const month = new Date(now * 1000);
  month.setDate(1);
  month.setHours(0, 0, 0, 0);
  const since = Math.floor(month.getTime() / 1000);
  const all = useApi(`/v1/clusters?past=${since}`);
  const trained = useApi("/v1/runs?past=1");
  const runs = trained.value ? trained.value.runs : [];
  const served = useApi("/v1/served");
  return html`<${Loaded} from=${all}>${(value) => {
    const live = value.clusters.filter((one) => one.state !== "GONE");
    const hourly = live.filter((one) => one.state === "UP").reduce((sum, one) => sum + (one.hourly_cost || 0), 0);
    const spent = value.clusters.reduce((sum, one) => sum + (one.cost || 0), 0);
    const jobs = live.reduce((sum, one) => sum + one.open_jobs, 0);
    const chips = live.filter((one) => one.state === "UP").reduce((sum, one) => sum + one.hosts.length * (one.order.chips_per_host || 0), 0);
    const needs = attention(live, value.orphans, runs, now);
    return html`<h1 class="visually-hidden">Home</h1>
      <div class="figures">
        <${Figure} label="Clusters" value=${live.length} note=${`${live.filter((one) => one.state === "UP").length} up`} />
        <${Figure} label="Chips" value=${chips} note="of clusters that are up" />
        <${Figure} label="Open jobs" value=${jobs} note="running or waiting" />
        <${Figure} label="Cost now" value=${`${dollars(hourly)}/h`} note="of what is up" />
        <${Figure} label="This month" value=${dollars(spent)} note="since the 1st" />
      </div>
      ${needs.length ? html`<${Card} title="Needs attention"><ul class="needs">${needs.map((one) => html`
        <li class=${one.tone} key=${one.key}>${one.to ? html`<${Link} to=${one.to}>${one.what}</${Link}>` : html`<b>${one.what}</b>`}<span class="muted">${one.hint}</span></li>`)}</ul></${Card}>` : null}
      <${Card} title="Clusters" aside=${html`<${Link} to="/clusters">All clusters</${Link}>`}>
        ${live.length ? html`<${Table} caption="Clusters" rows=${live.slice(-8).reverse().map((one) => ({ ...one, key: one.id }))} columns=${[
          { title: "Name", cell: (one) => html`<${Link} to=${`/clusters/${one.name}`}>${one.name}</${Link}>` },
          { title: "State", cell: (one) => html`<${State} state=${one.state} />` },
          { title: "Resources", cell: (one) => one.resources, minor: true },
          { title: "Jobs", cell: (one) => one.open_jobs, numeric: true },
          { title: "$/h", cell: (one) => dollars(one.hourly_cost), numeric: true },
          { title: "Created", cell: (one) => ago(one.created, now), minor: true },
        ]} />` : html`<${Empty} title="No clusters yet"><p>Run something on a simulated v6e-16: four hosts with four chips each, on this machine.</p>
          <${Code}>podway launch -c demo --tpus v6e-16 'hostname'</${Code}></${Empty}>`}
      </${Card}>
      <div class="columns">
        <${Card} title="Training" aside=${html`<${Link} to="/training">All runs</${Link}>`}>
          ${runs.length ? html`<${Table} caption="Latest training runs" rows=${runs.slice(0, 5).map((one) => ({ ...one, key: `${one.cluster}/${one.job}/${one.submitted}` }))} columns=${[
            { title: "Run", cell: (one) => html`<${Link} to=${`/training?runs=${one.cluster}/${one.job}`}>${one.name || "job"} <span class="muted">${one.cluster}/${one.job}</span></${Link}>` },
            { title: "State", cell: (one) => html`<${State} state=${one.state} />` },
            { title: "Ran for", cell: (one) => (one.started ? duration((one.ended || now) - one.started) : "–"), numeric: true },
          ]} />` : html`<p class="muted">No training runs yet.</p>`}</${Card}>
        <${Card} title="Models" aside=${html`<${Link} to="/models">Talk to them</${Link}>`}>
          ${served.value && served.value.served.length ? html`<${Table} caption="Jobs that serve a model" rows=${served.value.served.map((one) => ({ ...one, key: `${one.cluster}/${one.job}` }))} columns=${[
            { title: "Served by", cell: (one) => html`<${Link} to=${`/clusters/${one.cluster}/jobs/${one.job}`}>${one.name || "job"} <span class="muted">${one.cluster}/${one.job}</span></${Link}>` },
            { title: "Address there", cell: (one) => html`<code>${one.url}</code>`, minor: true },
          ]} />` : html`<p class="muted">No model is being served.</p>`}</${Card}>
      </div>`;
  }}</${Loaded}>`;
}
