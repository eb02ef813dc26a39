// Training runs over each other: what they measured step by step, and beside it what the planner said.

import { html, useState } from "../vendor/preact-htm.js";
import { MEASURES, smooth, steady, useRuns } from "../metrics.js";
import { useApi, useNow } from "../state.js";
import { Link, useQuery } from "../router.js";
import { Card, Code, Empty, Loaded, Problem, State, Table, useTitle } from "../parts/elements.js";
import { Bar } from "../parts/bars.js";
import { Lines } from "../parts/chart.js";
import { ago, big, duration, percent } from "../format.js";

const MOST = 8;
const CHARTS = [
  { name: "loss", title: "Loss", smoothed: true, also: "eval_loss" },
  { name: "tokens_per_second", title: "Tokens/s", total: true, planned: (plan) => plan.tokens_s },
  { name: "mfu", title: "MFU", planned: (plan) => plan.mfu },
  { name: "grad_norm", title: "Gradient norm", smoothed: true },
  { name: "seconds", title: "Step time, s", planned: (plan) => plan.step_s },
  { name: "goodput", title: "Goodput" },
  { name: "rate", title: "Learning rate" },
];
const keyOf = (run) => `${run.cluster}/${run.job}`;

export function Training() {
  useTitle("Training");
  const now = useNow(10000);
  const [query, setQuery] = useQuery();
  const [weight, setWeight] = useState(0);
  const all = useApi("/v1/runs?past=1");
  return html`<${Loaded} from=${all}>${(value) => {
    if (!value.runs.length) return html`<div class="heading"><h1>Training</h1></div><${Card}><${Empty} title="No training runs yet"><p>A job that runs <code>podway train</code>, or a program that prints steps as MaxText does, shows here while it trains.</p>
      <${Code}>podway launch -c demo examples/learn-by-heart.yaml</${Code}></${Empty}></${Card}>`;
    const known = new Map(value.runs.map((run) => [keyOf(run), run]));
    const asked = (query.get("runs") || keyOf(value.runs[0])).split(",").filter((key) => known.has(key)).slice(0, MOST);
    const toggle = (key) => setQuery({ runs: (asked.includes(key) ? asked.filter((one) => one !== key) : [...asked, key]).slice(-MOST).join() || "none" });
    return html`<${Body} known=${known} keys=${asked} toggle=${toggle} rows=${value.runs} now=${now} weight=${weight} setWeight=${setWeight} />`;
  }}</${Loaded}>`;
}

function Body({ known, keys, toggle, rows, now, weight, setWeight }) {
  const runs = useRuns(keys);
  const planned = useApi(keys.length ? `/v1/clusters/${keys[0].replace("/", "/jobs/")}/planned` : null);
  const cluster = useApi(keys.length ? `/v1/clusters/${keys[0].split("/")[0]}` : null);
  const plan = planned.value && planned.value.plan;
  const real = cluster.value && !cluster.value.simulated;
  const tone = (key) => keys.indexOf(key);
  const columns = [
    { title: "", cell: (run) => html`<input type="checkbox" aria-label=${`Show ${keyOf(run)}`} checked=${keys.includes(keyOf(run))} onChange=${() => toggle(keyOf(run))} />` },
    { title: "Run", cell: (run) => html`${keys.includes(keyOf(run)) ? html`<i class=${`dot tone${tone(keyOf(run))}`}></i>` : null}<${Link} to=${`/clusters/${run.cluster}/jobs/${run.job}`}>${run.name || "job"} <span class="muted">${keyOf(run)}</span></${Link}>` },
    { title: "State", cell: (run) => html`<${State} state=${run.state} />` },
    { title: "Model", cell: (run) => run.model || "–", minor: true },
    { title: "Resources", cell: (run) => run.resources, minor: true },
    { title: "By", cell: (run) => run.user, minor: true },
    { title: "Ran for", cell: (run) => (run.started ? duration((run.ended || now) - run.started) : "–"), numeric: true },
    { title: "Submitted", cell: (run) => ago(run.submitted, now), minor: true },
  ];
  const shown = CHARTS.filter((chart) => runs.some((run) => run.series[chart.name].x.length));
  return html`
    <div class="heading"><h1>Training</h1><label class="check">Smoothing
      <input type="range" min="0" max="0.98" step="0.02" value=${weight} onInput=${(event) => setWeight(Number(event.target.value))} /><span class="tabular smoothing">${weight.toFixed(2)}</span></label></div>
    ${runs.map((run) => html`<${Problem} key=${run.key} error=${run.error} />`)}
    ${shown.length ? html`<div class="charts">${shown.map((chart) => html`<${Card} key=${chart.name} title=${chart.title} aside=${html`<${Latest} chart=${chart} runs=${runs} keys=${keys} />`}>
        <${Lines} label=${`${chart.title} over steps`} lines=${linesOf(chart, runs, keys, known, weight)} level=${plan && chart.planned && real ? { name: "planned", value: chart.planned(plan) } : null} /></${Card}>`)}</div>`
      : keys.length ? html`<${Card}><${Empty} title=${runs.some((run) => !run.ended) ? "Waiting for the first step…" : "No steps were printed"}><p>The first step compiles the model: it takes a while.</p></${Empty}></${Card}>` : null}
    ${keys.length && planned.value ? html`<${Compared} title=${keys[0]} run=${runs[0]} planned=${planned.value} real=${real} />` : null}
    <${Card} title="Runs" aside=${html`<span class="muted">up to ${MOST} over each other</span>`}><${Table} caption="Training runs" rows=${rows.map((run) => ({ ...run, key: keyOf(run) + run.submitted }))} columns=${columns} /></${Card}>`;
}

const ofAll = (chart, run) => (chart.total ? run.series[chart.name].y.map((value) => value * run.devices) : run.series[chart.name].y);

function linesOf(chart, runs, keys, known, weight) {
  return runs.flatMap((run) => {
    const tone = keys.indexOf(run.key);
    const y = ofAll(chart, run);
    const line = { name: `${(known.get(run.key) || {}).name || ""} ${run.key}`, tone, x: run.series[chart.name].x, y: chart.smoothed && weight ? smooth(y, weight) : y };
    const also = chart.also && run.series[chart.also];
    return also && also.x.length ? [line, { name: `${line.name} evaluation`, tone: tone + 1, x: also.x, y: also.y }] : [line];
  });
}

const SHOWN = { loss: (value) => value.toFixed(3), tokens_per_second: big, mfu: percent, grad_norm: (value) => value.toFixed(2), seconds: duration, goodput: percent, rate: (value) => value.toExponential(1) };

const Latest = ({ chart, runs, keys }) => html`<span class="latest tabular">${runs.map((run) => {
  const y = ofAll(chart, run);
  return y.length ? html`<span><i class=${`dot tone${keys.indexOf(run.key)}`}></i>${SHOWN[chart.name](y[y.length - 1])}</span>` : null;
})}</span>`;

// Measured beside planned, for the first run that is shown.
function Compared({ title, run, planned, real }) {
  if (!planned.plan) return html`<${Card} title="Beside the plan"><p class="muted">${planned.note}.</p></${Card}>`;
  const { plan } = planned;
  const step = run ? steady(run.series.seconds.y) : null;
  const tokens = run ? steady(run.series.tokens_per_second.y) : null;
  const mfu = run ? steady(run.series.mfu.y) : null;
  const rows = [
    { key: "Step", planned: duration(plan.step_s), measured: duration(step), ratio: step && step / plan.step_s },
    { key: "Tokens/s", planned: big(plan.tokens_s), measured: tokens === null ? "–" : big(tokens * run.devices), ratio: tokens && (tokens * run.devices) / plan.tokens_s },
    { key: "MFU", planned: percent(plan.mfu), measured: mfu === null ? "–" : percent(mfu), ratio: mfu && mfu / plan.mfu },
  ];
  return html`<${Card} title="Beside the plan" aside=${html`<span class="muted">${title}: ${planned.model} on ${plan.slice}, ${plan.mesh}, ${plan.batch} x ${plan.seq}, remat ${plan.remat}</span>`}>
    ${real ? null : html`<p class="muted">This slice is simulated: what is measured is the speed of this machine, and what is planned is that of real chips.</p>`}
    <div class="columns"><div><${Table} caption="Measured beside planned" rows=${rows} columns=${[
      { title: "Of a step", cell: (one) => one.key },
      { title: "Planned", cell: (one) => one.planned, numeric: true },
      { title: "Measured", cell: (one) => one.measured, numeric: true },
      { title: "Ratio", cell: (one) => (one.ratio && real ? `${one.ratio.toFixed(2)}x` : "–"), numeric: true },
    ]} /></div>
    <div><h3>A step by kind of work, planned</h3><${Bar} parts=${planned.classes} format=${duration} label="Planned step" />
      ${run && run.profile ? html`<h3>Measured by the profile of steps ${run.profile.first} to ${run.profile.last}</h3><${Bar} parts=${withRest(run.profile.seconds, step)} format=${duration} label="Measured step" />`
        : html`<p class="muted">A profile of a TPU breaks the measured step down too: <code>logging.profile_at=20</code>.</p>`}</div></div></${Card}>`;
}

// Pure: what the profile does not account for is waiting.
export function withRest(parts, whole) {
  const known = Object.values(parts).reduce((sum, value) => sum + value, 0);
  return whole && whole > known ? { ...parts, waiting: whole - known } : parts;
}

export { MEASURES };
