// Every service, and one of them: replicas and probes, requests and latencies, what the autoscaler decided and why, revisions.

import { html, useMemo, useState } from "../vendor/preact-htm.js";
import { request } from "../api.js";
import { refresh, useApi, useNow } from "../state.js";
import { Link, go } from "../router.js";
import { Action, Card, Code, Empty, Figure, Loaded, State, Table, useTitle } from "../parts/elements.js";
import { Chart } from "../parts/chart.js";
import { ago, clock, dollars, duration, number } from "../format.js";

const LOAD_S = 5; // between two looks at the load: no stream tells of it
const SPANS = { "15 min": 900, "6 h": 21600, "7 days": 604800 };
const ready = (one) => one.replicas.filter((replica) => replica.state === "READY").length;
const rate = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 2 : 0));

export function Services() {
  useTitle("Services");
  const all = useApi("/v1/services");
  return html`<div class="heading"><h1>Services</h1></div><${Card}><${Loaded} from=${all}>${(value) => (value.services.length ? html`<${Table} caption="Services" rows=${value.services.slice().reverse().map((one) => ({ ...one, key: one.id }))}
    onOpen=${(one) => go(`/services/${one.name}`)} columns=${[
      { title: "Name", cell: (one) => html`<${Link} to=${`/services/${one.name}`}>${one.name}</${Link}>` },
      { title: "State", cell: (one) => html`<${State} state=${one.state} />` },
      { title: "Model", cell: (one) => one.model || "–", minor: true },
      { title: "Owner", cell: (one) => one.user, minor: true },
      { title: "Ready", cell: (one) => `${ready(one)} of ${one.target_replicas || one.replicas.length}`, numeric: true },
      { title: "Requests/s", cell: (one) => rate(one.rps), numeric: true },
      { title: "Revision", cell: (one) => one.revision, numeric: true, minor: true },
      { title: "$/h", cell: (one) => dollars(one.hourly_cost), numeric: true },
    ]} />` : html`<${Empty} title="No services"><p>A service keeps replicas of a task running behind one address: probes, rolling updates, and as many replicas as the load asks for.</p>
      <${Code}>podway apply -f service.yaml</${Code}></${Empty}>`)}</${Loaded}></${Card}>`;
}

export function ServiceView({ name, session }) {
  useTitle(name);
  const now = useNow(5000);
  const [span, setSpan] = useState("15 min");
  const path = `/v1/services/${encodeURIComponent(name)}`;
  const service = useApi(path);
  const events = useApi(`${path}/events`);
  const load = useApi(`${path}/load?seconds=${SPANS[span]}`, LOAD_S);
  const act = (method, where, body) => async () => {
    await request(method, where, body);
    refresh((one) => one.startsWith("/v1/services"));
  };
  const may = session.role !== "viewer";
  return html`<${Loaded} from=${service}>${(one) => {
    const open = one.state !== "GONE" && one.state !== "SHUTTING_DOWN";
    const points = load.value ? load.value.points : [];
    const last = points.findLast((point) => point.ttft);
    const written = points.findLast((point) => point.tpot);
    return html`<div class="heading"><h1>${one.name} <${State} state=${one.state} /></h1>
      ${may && open ? html`<div class="buttons">${one.groups.length ? null : html`<${Scale} one=${one} path=${path} act=${act} />`}
        <${Action} label="End" danger=${true} question=${`End ${one.name} and delete all its replicas? Requests under way are cut off.`} confirm="End the service" act=${act("DELETE", path)} /></div>` : null}</div>
    ${one.reason ? html`<p class="muted">${one.reason}</p>` : null}
    <div class="figures">
      <${Figure} label="Replicas ready" value=${`${ready(one)} of ${one.target_replicas || one.replicas.length}`} note=${one.min_replicas === one.max_replicas ? "fixed" : `${one.min_replicas} to ${one.max_replicas} by load`} />
      <${Figure} label="Requests/s" value=${rate(one.rps)} note=${one.rps === null ? "no gateway reports" : "of the last minute"} />
      <${Figure} label="TTFT, median" value=${last ? duration(last.ttft.p50) : "–"} note=${last ? `99 %: ${duration(last.ttft.p99)}` : "until the first byte"} />
      <${Figure} label="TPOT, median" value=${written ? duration(written.tpot.p50) : "–"} note=${written ? `99 %: ${duration(written.tpot.p99)}` : "between two tokens"} />
      <${Figure} label="Revision" value=${one.revision} note=${one.canary ? `canary ${one.canary}: ${Math.round(100 * one.canary_share)} %` : "on all replicas"} />
      <${Figure} label="Cost now" value=${`${dollars(one.hourly_cost)}/h`} note=${`${dollars(one.cost)} so far`} />
    </div>
    <${Card} title="Address">${one.url ? html`<${Code}>${one.url}</${Code}>` : html`<p class="muted">No gateway reports here: the service has the path <code>${one.path}</code> at any.</p>`}
      ${one.model ? html`<p class="muted small">Or as the model <b>${one.model}</b> of the gateway's OpenAI API${one.auth ? ", with a key" : ""}.</p><${Link} class="button" to="/models">Talk to it</${Link}>` : null}</${Card}>
    <div class="heading"><h2>Load</h2><div class="tabs" role="group" aria-label="Time">${Object.keys(SPANS).map((label) => html`<button key=${label} aria-pressed=${String(label === span)} onClick=${() => setSpan(label)}>${label}</button>`)}</div></div>
    <${Load} points=${points} />
    ${one.groups.length ? html`<${Card} title="Groups"><${Table} caption="Groups" rows=${one.groups.map((group) => ({ ...group, key: group.name }))} columns=${[
      { title: "Group", cell: (group) => html`${group.name} ${group.router ? html`<span class="muted">router (${group.router})</span>` : null}` },
      { title: "State", cell: (group) => html`<${State} state=${group.state} />` },
      { title: "Ready", cell: (group) => `${group.ready_replicas} of ${group.target_replicas}`, numeric: true },
      { title: "Range", cell: (group) => (group.min_replicas === group.max_replicas ? "fixed" : `${group.min_replicas} to ${group.max_replicas}`), minor: true },
      { title: "Why", cell: (group) => html`<span class="muted">${group.reason}</span>` },
      { title: "", cell: (group) => (may && open && !group.router ? html`<${Scale} one=${{ ...group, name: `group ${group.name} of ${one.name}` }} group=${group.name} path=${path} act=${act} />` : null), numeric: true },
    ]} /></${Card}>` : null}
    <${Card} title="Replicas"><${Table} caption="Replicas" rows=${one.replicas.map((replica) => ({ ...replica, key: replica.number }))} columns=${[
      ...(one.groups.length ? [{ title: "Group", cell: (replica) => replica.group }] : []),
      { title: "Replica", cell: (replica) => html`<${Link} to=${`/clusters/${replica.cluster}`}>${replica.number}</${Link}>` },
      { title: "State", cell: (replica) => html`<${State} state=${replica.state} />` },
      { title: "Probe", cell: (replica) => (replica.ready_since ? `passes for ${duration(now - replica.ready_since)}` : "not yet"), minor: true },
      { title: "Revision", cell: (replica) => replica.revision, numeric: true },
      { title: "Where", cell: (replica) => replica.infra, minor: true },
      { title: "Address", cell: (replica) => (replica.address || "–"), minor: true },
      { title: "$/h", cell: (replica) => dollars(replica.hourly_cost), numeric: true, minor: true },
      { title: "Why", cell: (replica) => html`<span class="muted">${replica.reason}</span>` },
    ]} /></${Card}>
    <div class="columns">
      <${Card} title="Revisions"><${Table} caption="Revisions" rows=${one.revisions.slice().reverse().map((revision) => ({ ...revision, key: revision.number }))} columns=${[
        { title: "Revision", cell: (revision) => html`${revision.number} ${revision.number === one.revision ? html`<span class="state good">current</span>` : revision.number === one.canary ? html`<span class="state warn">canary</span>` : null}` },
        { title: "By", cell: (revision) => revision.user },
        { title: "Made", cell: (revision) => html`<span title=${clock(revision.created)}>${ago(revision.created, now)}</span>` },
        { title: "", cell: (revision) => (may && open && revision.number !== one.revision ? html`<${Action} label=${revision.number < one.revision ? "Roll back" : "Roll forward"} question=${`Bring every replica of ${one.name} to revision ${revision.number}, one after the other?`} act=${act("POST", `${path}/rollback`, { revision: revision.number })} />` : null), numeric: true },
      ]} /></${Card}>
      <${Card} title="What happened, and why"><${Loaded} from=${events}>${(value) => html`<ol class="timeline" tabindex="0" aria-label="History">${value.events.slice(-200).reverse().map((event) => html`
        <li key=${event.id} class=${`event-${event.kind}`}><time title=${clock(event.time)}>${new Date(event.time * 1000).toLocaleTimeString()}</time>${event.job ? html`<span class="muted">replica ${event.job}</span>` : null}<span>${event.text}</span></li>`)}</ol>`}</${Loaded}></${Card}>
    </div>`;
  }}</${Loaded}>`;
}

function Scale({ one, path, act, group = null }) {
  const [least, setLeast] = useState(String(one.min_replicas));
  const [most, setMost] = useState(String(one.max_replicas));
  const now = () => {
    setLeast(String(one.min_replicas));
    setMost(String(one.max_replicas));
  };
  return html`<${Action} label="Scale" onOpen=${now} question=${`How many replicas of ${one.name}?`} confirm="Set it" act=${act("POST", `${path}/scale`, { min_replicas: Number(least), max_replicas: Number(most), group })}>
    <div class="form"><label>At least<input inputmode="numeric" value=${least} onInput=${(event) => setLeast(event.target.value)} /></label>
      <label>At most<input inputmode="numeric" value=${most} onInput=${(event) => setMost(event.target.value)} /></label></div></${Action}>`;
}

const percentiles = (name) => [["50 %", "--t0", "p50"], ["90 %", "--t1", "p90"], ["99 %", "--t4", "p99"]].map(([label, tone, part]) => [label, tone, (point) => point[name] && point[name][part]]);
const CHARTS = [
  { title: "Requests/s", lines: [["requests", "--t0", (point) => point.rps], ["failed", "--t4", (point) => point.failed]] },
  { title: "Time to first token", unit: duration, lines: percentiles("ttft"), none: "No request was answered in this time." },
  { title: "Time per token", unit: duration, lines: percentiles("tpot"), none: "No answer was streamed in this time." },
  { title: "In flight and waiting", lines: [["in flight", "--t0", (point) => point.in_flight], ["waiting", "--t1", (point) => point.waiting]] },
];

function Load({ points }) {
  if (!points.length) return html`<${Card}><p class="muted">No gateway has reported a request in this time.</p></${Card}>`;
  return html`<div class="charts">${CHARTS.map((chart) => html`<${Card} key=${chart.title} title=${chart.title} aside=${html`<span class="latest">${chart.lines.map(([label, tone]) => html`<span key=${label}><i class=${`dot tone${tone.slice(3)}`}></i>${label}</span>`)}</span>`}><${Over} chart=${chart} points=${points} /></${Card}>`)}</div>`;
}

const moment = (time) => new Date(time * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: time % 60 ? "2-digit" : undefined });

function Over({ chart, points }) {
  if (!points.some((point) => chart.lines.some(([, , value]) => value(point) !== null))) return html`<p class="muted">${chart.none}</p>`;
  return html`<${Drawn} chart=${chart} points=${points} />`;
}

function Drawn({ chart, points }) {
  const data = useMemo(() => [points.map((point) => point.at), ...chart.lines.map(([, , value]) => points.map((point) => value(point) ?? null))], [points]);
  const show = chart.unit || ((value) => number(value, 2));
  const make = (colour, axis) => ({
    scales: { y: { range: (_, low, high) => [0, (high > 0 ? high : 1) * 1.15] } },
    axes: [{ ...axis, size: 28, space: 70, values: (_, ticks) => ticks.map(moment) }, { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => (tick ? show(tick) : "0")) }],
    series: [{}, ...chart.lines.map(([label, tone]) => ({ label, stroke: colour(tone), width: 1.6, spanGaps: true, points: { show: points.length < 3 } }))],
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
  });
  return html`<${Chart} make=${make} data=${data} height=${200} shape=${`${chart.title}${points.length < 3}`} label=${`${chart.title} over time`} />`;
}
