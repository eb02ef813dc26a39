// The planner as a form: the ranking as a plot of cost against time, and one plan in detail.

import { html, useMemo, useState } from "../vendor/preact-htm.js";
import { request } from "../api.js";
import { Card, Code, Empty, Problem, Table, useTitle } from "../parts/elements.js";
import { Bar } from "../parts/bars.js";
import { Chart } from "../parts/chart.js";
import { Torus } from "../parts/torus.js";
import { big, dollars, duration, gib, number } from "../format.js";

// Pure: the plans that no other beats in both cost and time.
export function frontier(plans) {
  const sorted = plans.filter((one) => one.cost !== null && one.hours !== null).sort((a, b) => a.hours - b.hours || a.cost - b.cost);
  const found = [];
  let least = Infinity;
  for (const one of sorted)
    if (one.cost < least) {
      found.push(one);
      least = one.cost;
    }
  return found;
}

const FIELDS = [
  { name: "model", label: "Model", value: "llama3.1-8b", hint: "a name, such as llama3.1-8b, mixtral-8x7b or qwen3-8b" },
  { name: "tpu", label: "Slices", value: "v6e", hint: "a generation, a type, or several with commas" },
  { name: "seq", label: "Sequence", value: "8192", numeric: true, hint: "tokens of one sequence" },
  { name: "tokens", label: "Train on", value: "10", numeric: true, hint: "billion tokens", scale: 1e9 },
  { name: "budget", label: "Budget", value: "", numeric: true, hint: "dollars, or empty" },
];

export function Plan() {
  useTitle("Plan");
  const [form, setForm] = useState(Object.fromEntries(FIELDS.map((one) => [one.name, one.value])));
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const [chosen, setChosen] = useState(0);
  const ask = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    const body = {};
    for (const one of FIELDS) if (form[one.name] !== "") body[one.name] = one.numeric ? Number(form[one.name]) * (one.scale || 1) : form[one.name];
    try {
      setAnswer(await request("POST", "/v1/plan", body));
      setChosen(0);
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  return html`
    <${Card} title="Plan a training run"><form class="form" onSubmit=${ask}>
      ${FIELDS.map((one) => html`<label>${one.label}<input name=${one.name} value=${form[one.name]} inputmode=${one.numeric ? "decimal" : "text"}
        required=${one.name !== "budget"} onInput=${(event) => setForm({ ...form, [one.name]: event.target.value })} aria-describedby=${`hint-${one.name}`} /><small id=${`hint-${one.name}`}>${one.hint}</small></label>`)}
      <button class="primary" disabled=${busy}>${busy ? "Planning…" : "Plan"}</button></form>
      <${Problem} error=${error} />
    </${Card}>
    ${answer ? html`<${Answer} answer=${answer} chosen=${chosen} choose=${setChosen} seq=${form.seq} />`
      : html`<${Empty} title="Know before you pay"><p>Which slice, mesh and batch fit, how fast they run and what they cost, from the same model of the chips that the command line uses.</p></${Empty}>`}`;
}

function Answer({ answer, chosen, choose, seq }) {
  const plans = answer.plans;
  const best = useMemo(() => new Set(frontier(plans)), [plans]);
  const points = useMemo(() => {
    const shown = plans.filter((one) => one.hours !== null && one.cost !== null).sort((a, b) => a.hours - b.hours);
    return [shown.map((one) => one.hours), shown.map((one) => one.cost), shown.map((one) => (best.has(one) ? one.cost : null))];
  }, [plans]);
  if (!plans.length) return html`<${Empty} title="Nothing fits"><p>Try more chips, a shorter sequence, or another generation.</p></${Empty}>`;
  const plan = plans[Math.min(chosen, plans.length - 1)];
  const make = (colour, axis) => ({
    scales: { x: { time: false, distr: 3 }, y: { range: (_, low, high) => [0, high * 1.2] } },
    axes: [{ ...axis, label: "hours", labelSize: 20 }, { ...axis, label: "dollars", labelSize: 20, size: 70 }],
    series: [{ label: "hours" }, { label: "cost", paths: () => null, points: { show: true, size: 7, stroke: colour("--muted"), fill: colour("--surface") } },
      { label: "frontier", stroke: colour("--accent"), width: 2, spanGaps: true, points: { show: true, size: 8, fill: colour("--accent") } }],
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
  });
  return html`
    ${points[0].length > 1 ? html`<${Card} title="Cost against time" aside=${html`<span class="muted">${answer.model}, ${big(answer.parameters)} parameters; filled: nothing is both cheaper and faster</span>`}>
      <${Chart} make=${make} data=${points} label="Cost of each plan against its time" /></${Card}>` : null}
    <div class="columns wide-left">
      <${Card} title="Plans, best first"><${Table} caption="Plans" rows=${plans.map((one, index) => ({ ...one, key: index }))} onOpen=${(one) => choose(one.key)} columns=${[
        { title: "Slice", cell: (one) => html`<button class="link" aria-pressed=${String(one.key === chosen)} onClick=${() => choose(one.key)}>${one.slice}</button>` },
        { title: "Mesh", cell: (one) => one.mesh },
        { title: "Batch", cell: (one) => number(one.batch), numeric: true, minor: true },
        { title: "Step", cell: (one) => duration(one.step_s), numeric: true },
        { title: "Tokens/s", cell: (one) => big(one.tokens_s), numeric: true, minor: true },
        { title: "MFU", cell: (one) => `${(100 * one.mfu).toFixed(0)} %`, numeric: true },
        { title: "Time", cell: (one) => (one.hours === null ? "–" : duration(one.hours * 3600)), numeric: true },
        { title: "Cost", cell: (one) => dollars(one.cost, 0), numeric: true },
      ]} /></${Card}>
      <${Card} title=${`${plan.slice}, ${plan.mesh}`}>
        <h3>Memory of a chip</h3><${Bar} parts=${plan.memory} limit=${plan.memory_limit} format=${gib} label="Memory" />
        <h3>A step of ${duration(plan.step_s)}</h3><${Bar} parts=${plan.time} format=${duration} label="Time" />
        <h3>The slice</h3><${Torus} topology=${plan.topology} hosts=${1} />
        <h3>Next</h3><${Code}>${`podway rehearse train ${answer.model} --tpu ${plan.slice} --seq ${seq}`}</${Code}>
      </${Card}>
    </div>`;
}
