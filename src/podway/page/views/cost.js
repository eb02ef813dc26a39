// What clusters cost: by day, by person, by model and one by one, and what of it idled.

import { html, useMemo, useState } from "../vendor/preact-htm.js";
import { useApi, useNow } from "../state.js";
import { Link } from "../router.js";
import { Card, Empty, Figure, Loaded, State, Table, useTitle } from "../parts/elements.js";
import { Chart, barPaths } from "../parts/chart.js";
import { clock, dollars, duration } from "../format.js";

const SPANS = { "7 days": 7, "30 days": 30, "90 days": 90 };

// Pure: rows summed by a key, the dearest first.
export function sums(clusters, key) {
  const found = new Map();
  for (const one of clusters) {
    const name = key(one);
    const row = found.get(name) || { key: name, cost: 0, hours: 0, idle: 0, clusters: 0 };
    row.cost += one.cost;
    row.hours += one.up_s / 3600;
    row.idle += one.idle_cost;
    row.clusters += 1;
    found.set(name, row);
  }
  return [...found.values()].sort((a, b) => b.cost - a.cost || b.hours - a.hours);
}

const total = (rows, name) => rows.reduce((sum, one) => sum + (one[name] || 0), 0);

export function Cost() {
  useTitle("Cost");
  const now = useNow(60000);
  const [span, setSpan] = useState("30 days");
  const since = Math.floor(now / 3600) * 3600 - SPANS[span] * 86400;
  const all = useApi(`/v1/costs?past=${since}`);
  return html`
    <div class="heading"><h1>Cost</h1><div class="tabs" role="group" aria-label="Time">${Object.keys(SPANS).map((name) => html`<button key=${name} aria-pressed=${String(name === span)} onClick=${() => setSpan(name)}>${name}</button>`)}</div></div>
    <${Loaded} from=${all}>${(value) => (value.clusters.length ? html`<${Spent} value=${value} span=${span} />`
      : html`<${Card}><${Empty} title="Nothing was launched in this time"><p>Costs appear here as soon as a cluster is up.</p></${Empty}></${Card}>`)}</${Loaded}>`;
}

function Spent({ value, span }) {
  const { clusters, days } = value;
  const cost = total(clusters, "cost");
  const idle = total(clusters, "idle_cost");
  const columns = (title) => [
    { title, cell: (one) => one.key },
    { title: "Clusters", cell: (one) => one.clusters, numeric: true },
    { title: "Hours up", cell: (one) => one.hours.toFixed(1), numeric: true },
    { title: "Idled", cell: (one) => dollars(one.idle), numeric: true },
    { title: "Cost", cell: (one) => dollars(one.cost), numeric: true },
  ];
  const idlers = clusters.filter((one) => one.idle_s > 60).sort((a, b) => b.idle_cost - a.idle_cost || b.idle_s - a.idle_s).slice(0, 8);
  return html`
    <div class="figures"><${Figure} label="Spent" value=${dollars(cost)} note=${`in ${span}`} />
      <${Figure} label="Idled" value=${dollars(idle)} note=${cost ? `${Math.round((100 * idle) / cost)} % of it: up, with no job` : "up, with no job"} />
      <${Figure} label="Hours up" value=${(total(clusters, "up_s") / 3600).toFixed(1)} note="of all clusters" />
      <${Figure} label="Now" value=${`${dollars(total(clusters.filter((one) => one.state === "UP"), "hourly_cost"))}/h`} note="of what is up" /></div>
    <${Card} title="By day">${cost ? html`<${Days} days=${days} />` : html`<p class="muted">Nothing of this time has a price: simulated slices and machines of your own cost nothing here.</p>`}</${Card}>
    <div class="columns"><${Card} title="By person"><${Table} caption="Cost by person" rows=${sums(clusters, (one) => one.user)} columns=${columns("Person")} /></${Card}>
      <${Card} title="By model"><${Table} caption="Cost by model" rows=${sums(clusters, (one) => one.model || "other jobs")} columns=${columns("Model")} /></${Card}></div>
    ${idlers.length ? html`<${Card} title="What idled" aside=${html`<span class="muted">autostop ends a cluster that idles</span>`}><${Table} caption="What idled" rows=${idlers.map((one) => ({ ...one, key: one.id }))} columns=${[
      { title: "Cluster", cell: (one) => html`<${Link} to=${`/clusters/${one.name}`}>${one.name}</${Link}>` },
      { title: "State", cell: (one) => html`<${State} state=${one.state} />` },
      { title: "Owner", cell: (one) => one.user, minor: true },
      { title: "Up for", cell: (one) => duration(one.up_s), numeric: true, minor: true },
      { title: "Idle for", cell: (one) => duration(one.idle_s), numeric: true },
      { title: "Cost of it", cell: (one) => dollars(one.idle_cost), numeric: true },
    ]} /></${Card}>` : null}
    <${Card} title="Clusters"><${Table} caption="Cost by cluster" rows=${clusters.slice().reverse().map((one) => ({ ...one, key: one.id }))} columns=${[
      { title: "Name", cell: (one) => html`<${Link} to=${`/clusters/${one.name}`}>${one.name}</${Link}>` },
      { title: "State", cell: (one) => html`<${State} state=${one.state} />` },
      { title: "Owner", cell: (one) => one.user, minor: true },
      { title: "Resources", cell: (one) => one.resources, minor: true },
      { title: "Model", cell: (one) => one.model || "–", minor: true },
      { title: "Created", cell: (one) => clock(one.created), minor: true },
      { title: "Up for", cell: (one) => duration(one.up_s), numeric: true },
      { title: "Cost", cell: (one) => dollars(one.cost), numeric: true },
    ]} /></${Card}>`;
}

// Bars of each day, with what idled in the lower part.
function Days({ days }) {
  const data = useMemo(() => [days.map((one) => Date.parse(one.day) / 1000), days.map((one) => one.cost), days.map((one) => one.idle_cost)], [days]);
  const make = (colour, axis) => ({
    scales: { x: { range: (_, low, high) => [low - 43200, high + 43200] }, y: { range: (_, low, high) => [0, Math.max(0.01, high) * 1.15] } },
    axes: [{ ...axis, grid: { show: false }, values: "{MMM} {DD}", space: 60 }, { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => `$${tick}`) }],
    series: [{}, bars("cost", colour("--t0")), bars("idled", colour("--t1"))],
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
  });
  return html`<${Chart} make=${make} data=${data} height=${180} shape="days" label=${`Cost of each day: ${days.filter((one) => one.cost).map((one) => `${one.day} ${dollars(one.cost)}`).join(", ")}`} />
    <p class="legend muted small"><span><i class="dot tone0"></i>cost</span><span><i class="dot tone1"></i>of it idled</span></p>`;
}

const bars = (label, stroke) => ({ label, stroke, fill: stroke, width: 0, paths: barPaths, points: { show: false } });
