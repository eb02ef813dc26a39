// The planner as a form: the ranking as a plot of cost against time, and one plan in detail, to rehearse and to launch.

import { html, useMemo, useState } from "../vendor/preact-htm.js";
import { ApiError, request } from "../api.js";
import { Card, Empty, Problem, Table, useTitle } from "../parts/elements.js";
import { Bar } from "../parts/bars.js";
import { Chart } from "../parts/chart.js";
import { Torus } from "../parts/torus.js";
import { LaunchPlan } from "./launch_plan.js";
import { Rehearsal } from "./rehearsal.js";
import { big, dollars, duration, gib, number, percent } from "../format.js";

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
  { name: "model", label: "Model", value: "llama3.1-8b", hint: "a name, such as qwen3-8b" },
  { name: "tpu", label: "Slices", value: "v6e", hint: "a generation or types, with commas" },
  { name: "seq", label: "Sequence", value: "8192", numeric: true, hint: "tokens of one" },
  { name: "tokens", label: "Train on", value: "10", numeric: true, hint: "billion tokens", scale: 1e9 },
  { name: "days", label: "Within", value: "", numeric: true, hint: "days, or empty" },
  { name: "budget", label: "Budget", value: "", numeric: true, hint: "dollars, or empty" },
];
const OPTIONAL = new Set(["days", "budget"]);

// Pure: what is sent. A config.json takes the place of the model's name.
export function planBody(form, config, spot) {
  const body = { spot };
  for (const one of FIELDS) if (form[one.name] !== "" && !(one.name === "model" && config)) body[one.name] = one.numeric ? Number(form[one.name]) * (one.scale || 1) : form[one.name];
  if (config) body.config = config;
  return body;
}

export function Plan({ session }) {
  useTitle("Plan");
  const [form, setForm] = useState(Object.fromEntries(FIELDS.map((one) => [one.name, one.value])));
  const [text, setText] = useState(null); // of a config.json; null: the model is named
  const [spot, setSpot] = useState(false);
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const [chosen, setChosen] = useState(0);
  const ask = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const config = text === null ? null : readConfig(text);
      const reply = await request("POST", "/v1/plan", planBody(form, config, spot));
      setAnswer({ ...reply, config });
      setChosen(0);
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  const upload = async (event) => {
    const file = event.target.files[0];
    if (file) setText(await file.text());
  };
  return html`
    <div class="heading"><h1>Plan a training run</h1></div>
    <${Card}><form onSubmit=${ask}>
      <div class="form">${FIELDS.map((one) => html`<label key=${one.name}>${one.label}<input name=${one.name} value=${one.name === "model" && text !== null ? "config.json" : form[one.name]} inputmode=${one.numeric ? "decimal" : "text"}
        disabled=${one.name === "model" && text !== null} required=${!OPTIONAL.has(one.name)} onInput=${(event) => setForm({ ...form, [one.name]: event.target.value })} aria-describedby=${`hint-${one.name}`} /><small id=${`hint-${one.name}`}>${one.hint}</small></label>`)}</div>
      ${text === null ? null : html`<div class="stack config"><label>config.json of the model, as Hugging Face has it
        <textarea name="config" rows="6" spellcheck="false" value=${text} onInput=${(event) => setText(event.target.value)} placeholder='{"architectures": ["LlamaForCausalLM"], …}'></textarea></label>
        <label>or a file <input type="file" accept=".json,application/json" onChange=${upload} /></label></div>`}
      <div class="buttons form-end"><button class="primary" disabled=${busy}>${busy ? "Planning…" : "Plan"}</button>
        <button type="button" onClick=${() => setText(text === null ? "" : null)}>${text === null ? "Use a config.json" : "Use a model's name"}</button>
        <label class="check"><input type="checkbox" checked=${spot} onChange=${(event) => setSpot(event.target.checked)} /> Spot prices</label></div></form>
      <${Problem} error=${error} />
    </${Card}>
    ${answer ? html`<${Answer} answer=${answer} chosen=${chosen} choose=${setChosen} session=${session} spot=${spot} />`
      : html`<${Empty} title="Know before you pay"><p>Which slice, mesh and batch fit, how fast they run and what they cost, from the same model of the chips that the command line uses.</p></${Empty}>`}`;
}

function readConfig(text) {
  try {
    return JSON.parse(text);
  } catch (problem) {
    throw new ApiError(0, `This config.json is not JSON: ${problem.message}`, "Paste the whole file.");
  }
}

function Answer({ answer, chosen, choose, session, spot }) {
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
        { title: "MFU", cell: (one) => percent(one.mfu), numeric: true },
        { title: "Time", cell: (one) => (one.hours === null ? "–" : duration(one.hours * 3600)), numeric: true },
        { title: "Cost", cell: (one) => dollars(one.cost, 0), numeric: true },
      ]} /></${Card}>
      <${Detail} key=${`${chosen} ${plan.slice} ${plan.mesh}`} plan=${plan} answer=${answer} session=${session} spot=${spot} />
    </div>`;
}

function Detail({ plan, answer, session, spot }) {
  const axes = Object.keys(plan.boxes);
  const [axis, setAxis] = useState(axes[0]);
  return html`<${Card} title=${`${plan.slice}, ${plan.mesh}`}>
    <h3>Memory of a chip</h3><${Bar} parts=${plan.memory} limit=${plan.memory_limit} format=${gib} label="Memory" />
    <h3>A step of ${duration(plan.step_s)}</h3><${Bar} parts=${plan.time} format=${duration} label="Time" />
    <h3>The mesh in the torus (${plan.topology})</h3>
    ${axes.length ? html`<div class="tabs" role="group" aria-label="Mesh axis">${axes.map((name) => html`<button key=${name} aria-pressed=${String(name === axis)} onClick=${() => setAxis(name)}>${name} ${plan.axes[name]}</button>`)}</div>` : null}
    <${Torus} topology=${plan.topology} box=${plan.boxes[axis]} label=${`The groups of ${axis} in a ${plan.topology} torus`} />
    ${axis ? html`<p class="muted small">Chips of one colour exchange data over <b>${axis}</b>${axes.indexOf(axis) ? ", and over the axes before it" : ""}.</p>` : null}
    ${session.role === "viewer" ? null : html`<h3>Next</h3><div class="stack">
      <${Rehearsal} plan=${plan} model=${answer.config ? "" : answer.model} config=${answer.config} />
      ${answer.config ? null : html`<${LaunchPlan} plan=${plan} model=${answer.model} spot=${spot} />`}</div>`}
  </${Card}>`;
}
