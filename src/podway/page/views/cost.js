// What clusters cost: by person, by day, and one by one.

import { html, useState } from "../vendor/preact-htm.js";
import { useApi, useNow } from "../state.js";
import { Link } from "../router.js";
import { Card, Empty, Figure, Loaded, State, Table, useTitle } from "../parts/elements.js";
import { clock, dollars, duration } from "../format.js";

const SPANS = { "7 days": 7, "30 days": 30, "90 days": 90 };

export function sums(clusters, key) {
  const found = new Map();
  for (const one of clusters) {
    const row = found.get(key(one)) || { key: key(one), cost: 0, hours: 0, clusters: 0 };
    row.cost += one.cost || 0;
    row.hours += one.billed_s / 3600;
    row.clusters += 1;
    found.set(key(one), row);
  }
  return [...found.values()].sort((a, b) => b.cost - a.cost || b.hours - a.hours);
}

export function Cost() {
  useTitle("Cost");
  const now = useNow(60000);
  const [span, setSpan] = useState("30 days");
  const since = Math.floor(now / 60) * 60 - SPANS[span] * 86400;
  const all = useApi(`/v1/clusters?past=${since}`);
  const columns = (title) => [
    { title, cell: (one) => one.key },
    { title: "Clusters", cell: (one) => one.clusters, numeric: true },
    { title: "Hours up", cell: (one) => one.hours.toFixed(1), numeric: true },
    { title: "Cost", cell: (one) => dollars(one.cost), numeric: true },
  ];
  return html`
    <div class="tabs" role="tablist" aria-label="Time">${Object.keys(SPANS).map((name) => html`<button role="tab" aria-selected=${String(name === span)} onClick=${() => setSpan(name)}>${name}</button>`)}</div>
    <${Loaded} from=${all}>${(value) => {
      const shown = value.clusters.filter((one) => one.created >= since || one.state !== "GONE");
      if (!shown.length) return html`<${Empty} title="Nothing was launched in this time"><p>Costs appear here as soon as a cluster is up.</p></${Empty}>`;
      return html`
        <div class="figures"><${Figure} label="Spent" value=${dollars(shown.reduce((sum, one) => sum + (one.cost || 0), 0))} note=${`in ${span}`} />
          <${Figure} label="Hours up" value=${(shown.reduce((sum, one) => sum + one.billed_s, 0) / 3600).toFixed(1)} note="of all clusters" />
          <${Figure} label="Now" value=${`${dollars(shown.filter((one) => one.state === "UP").reduce((sum, one) => sum + (one.hourly_cost || 0), 0))}/h`} note="of what is up" /></div>
        <div class="columns"><${Card} title="By person"><${Table} caption="Cost by person" rows=${sums(shown, (one) => one.user)} columns=${columns("Person")} /></${Card}>
          <${Card} title="By day"><${Table} caption="Cost by day" rows=${sums(shown, (one) => new Date(one.created * 1000).toISOString().slice(0, 10)).sort((a, b) => (a.key < b.key ? 1 : -1))} columns=${columns("Created on")} /></${Card}></div>
        <${Card} title="Clusters"><${Table} caption="Cost by cluster" rows=${shown.slice().reverse().map((one) => ({ ...one, key: one.id }))} columns=${[
          { title: "Name", cell: (one) => html`<${Link} to=${`/clusters/${one.name}`}>${one.name}</${Link}>` },
          { title: "State", cell: (one) => html`<${State} state=${one.state} />` },
          { title: "Owner", cell: (one) => one.user, minor: true },
          { title: "Resources", cell: (one) => one.resources, minor: true },
          { title: "Created", cell: (one) => clock(one.created), minor: true },
          { title: "Up for", cell: (one) => duration(one.billed_s), numeric: true },
          { title: "Cost", cell: (one) => dollars(one.cost), numeric: true },
        ]} /></${Card}>`;
    }}</${Loaded}>`;
}
