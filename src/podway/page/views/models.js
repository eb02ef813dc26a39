// Talk to models: one, or two side by side with the same words. Answers come as they are written, with their speed.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { ApiError, events } from "../api.js";
import { useApi } from "../state.js";
import { Card, Code, Empty, Loaded, Problem, useTitle } from "../parts/elements.js";
import { duration } from "../format.js";

const PARAMETERS = [
  { name: "max_tokens", label: "Most tokens", value: "256", hint: "of an answer", step: 1 },
  { name: "temperature", label: "Temperature", value: "0.7", hint: "0 is always the same", step: 0.1 },
  { name: "top_p", label: "Top p", value: "1", hint: "of the probability", step: 0.05 },
  { name: "seed", label: "Seed", value: "", hint: "empty: another each time", step: 1 },
];

// Pure: what is sent. A model without a chat template goes on with a text; the conversation is then that text.
export function chatBody(model, system, messages, parameters, plain = false) {
  const body = plain ? { model, prompt: messages.map((one) => one.content).join("") } : { model, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] };
  for (const { name } of PARAMETERS) if (parameters[name] !== "") body[name] = Number(parameters[name]);
  return body;
}

// Pure: what can be talked to: the models of services, through their gateway, and jobs that serve one. Of two services with one model
// the newest answers for it.
export function sources(services, served) {
  const newest = new Map();
  for (const one of services) if (one.model && one.state !== "GONE" && one.state !== "SHUTTING_DOWN") newest.set(one.model, one);
  const models = [...newest.values()].map((one) => ({
    key: `service ${one.name}`, label: `${one.model} (service ${one.name})`, path: `/v1/services/${encodeURIComponent(one.name)}`,
    known: { models: [one.model], ready: one.state === "READY" || one.min_replicas === 0, note: one.state.replaceAll("_", " ").toLowerCase() },
    base: one.url ? `${one.url.slice(0, -one.path.length)}/v1` : "GATEWAY/v1", secret: one.auth,
    where: one.url ? `The address is the gateway's${one.auth ? "; podway gateway keys create NAME makes a key for it" : ""}.` : "No gateway reports to this server: put in the address of yours.",
  }));
  const jobs = served.map((one) => ({
    key: `${one.cluster}/${one.job}`, label: `${one.name || "job"} (${one.cluster}/${one.job})`, path: `/v1/clusters/${encodeURIComponent(one.cluster)}/jobs/${one.job}`,
    known: null, base: one.url, secret: false, where: `The address is the one on the first host of ${one.cluster}.`,
  }));
  return [...models, ...jobs];
}

const python = (base, body, secret) => `${secret ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${base}", api_key=${secret ? 'os.environ["GATEWAY_KEY"]' : '"none"'})
reply = client.${body.prompt === undefined ? "chat.completions" : "completions"}.create(
    model=${JSON.stringify(body.model)},
    ${body.prompt === undefined ? `messages=${JSON.stringify(body.messages, null, 4).replaceAll("\n", "\n    ")}` : `prompt=${JSON.stringify(body.prompt)}`},
${PARAMETERS.filter(({ name }) => name in body).map(({ name }) => `    ${name}=${body[name]},\n`).join("")}    stream=True,
)
for chunk in reply:
    print(${body.prompt === undefined ? 'chunk.choices[0].delta.content or ""' : "chunk.choices[0].text"}, end="", flush=True)
`;
const curl = (base, body, secret) => `curl ${base}/${body.prompt === undefined ? "chat/" : ""}completions${secret ? ' -H "authorization: Bearer $GATEWAY_KEY"' : ""} -H 'content-type: application/json' -d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`;

export function Models({ session }) {
  useTitle("Models");
  const jobs = useApi("/v1/served");
  const services = useApi("/v1/services");
  return html`<${Loaded} from=${services.value === undefined ? services : jobs}>${(value) => {
    const found = sources(services.value.services, value.served);
    return found.length ? html`<${Playground} served=${found} session=${session} />`
      : html`<div class="heading"><h1>Models</h1></div><${Card}><${Empty} title="No model is being served"><p>A job that runs <code>podway serve</code> shows here as soon as it runs, and so does a service with a model. A tiny model with random weights, on a simulated slice:</p>
      <${Code}>podway launch -d -c chat --infra local --tpus v6e-1 'podway serve tiny-llama3 --random --port 8000'</${Code}></${Empty}></${Card}>`;
  }}</${Loaded}>`;
}

const READY_S = 3; // between two looks at a model that is not ready yet

// In the place of what was talked to and is there no more: another model must not go on with its conversation.
const gone = (key) => ({ key, label: key, path: "", known: { models: [], ready: false, note: "not served any more" }, base: "", secret: false, where: "" });

function Playground({ served, session }) {
  const [sides, setSides] = useState([served[0].key]);
  const [system, setSystem] = useState("");
  const [plain, setPlain] = useState(false);
  const [parameters, setParameters] = useState(Object.fromEntries(PARAMETERS.map((one) => [one.name, one.value])));
  const [draft, setDraft] = useState("");
  const [sent, setSent] = useState(null); // {text, number}: both sides answer it
  const [cleared, setCleared] = useState(0);
  const [busy, setBusy] = useState({});
  const [models, setModels] = useState({});
  const chosen = sides.map((key) => served.find((one) => one.key === key) || gone(key));
  const able = chosen.every((_, index) => models[index]);
  const working = Object.values(busy).some(Boolean);
  const send = (event) => {
    event.preventDefault();
    if (!draft.trim() || working || !able) return;
    setSent({ text: draft, number: (sent ? sent.number : 0) + 1 });
    setDraft("");
  };
  const keys = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && send(event);
  const body = chatBody(models[0] || "MODEL", system, [{ role: "user", content: draft || (sent ? sent.text : "Hello") }], parameters, plain);
  return html`
    <div class="heading"><h1>Models</h1><div class="buttons">
      <div class="tabs" role="group" aria-label="Mode">${[[false, "Chat"], [true, "Continue a text"]].map(([value, label]) => html`<button key=${label} aria-pressed=${String(plain === value)} onClick=${() => setPlain(value)} disabled=${working}>${label}</button>`)}</div>
      <button onClick=${() => setSides(sides.length === 1 ? [sides[0], served[Math.min(1, served.length - 1)].key] : sides.slice(0, 1))}>${sides.length === 1 ? "Compare two" : "Show one"}</button>
      <button onClick=${() => { setCleared(cleared + 1); setSent(null); }} disabled=${working || !sent}>Clear</button></div></div>
    <div class="chat-layout"><div class="chat-main">
      <div class=${`sides n${chosen.length}`}>${chosen.map((one, index) => html`<${Side} key=${`${index} ${cleared}`} index=${index} one=${one} served=${served} sent=${sent} system=${system} parameters=${parameters} plain=${plain}
        choose=${(key) => setSides(sides.map((old, at) => (at === index ? key : old)))} onBusy=${(now) => setBusy((old) => ({ ...old, [index]: now }))} onModel=${(name) => setModels((old) => ({ ...old, [index]: name }))} />`)}</div>
      ${session.role === "viewer" ? html`<p class="muted">Your role may look, and not ask: chatting uses a cluster.</p>` : html`<form class="composer" onSubmit=${send}>
        <label class="visually-hidden" for="draft">Your message</label>
        <textarea id="draft" rows="3" placeholder=${plain ? "A text to go on with. Enter sends." : "Ask something. Enter sends, Shift+Enter begins a new line."} value=${draft} onInput=${(event) => setDraft(event.target.value)} onKeyDown=${keys}></textarea>
        <button class="primary" disabled=${!draft.trim() || working || !able}>${working ? "Answering…" : "Send"}</button></form>`}
    </div>
    <div class="chat-aside">
      <${Card} title="Parameters"><div class="stack">
        <label>System prompt<textarea rows="3" value=${system} placeholder=${plain ? "not used for a text" : "none"} disabled=${plain} onInput=${(event) => setSystem(event.target.value)}></textarea></label>
        ${PARAMETERS.map((one) => html`<label key=${one.name}>${one.label}<input type="number" step=${one.step} min="0" value=${parameters[one.name]} onInput=${(event) => setParameters({ ...parameters, [one.name]: event.target.value })} /><small>${one.hint}</small></label>`)}
      </div></${Card}>
      <${Samples} body=${body} one=${chosen[0]} />
    </div></div>`;
}

function Samples({ body, one }) {
  const [kind, setKind] = useState("Python");
  return html`<${Card} title="The same in code"><div class="tabs" role="group" aria-label="Language">${["Python", "curl"].map((name) => html`
      <button key=${name} aria-pressed=${String(name === kind)} onClick=${() => setKind(name)}>${name}</button>`)}</div>
    <${Code} block=${true}>${(kind === "Python" ? python : curl)(one.base, body, one.secret)}</${Code}>
    <p class="muted small">${one.where}</p></${Card}>`;
}

// One model's side of the conversation.
function Side({ index, one, served, sent, system, parameters, plain, choose, onBusy, onModel }) {
  const [talk, setTalk] = useState([]);
  const [error, setError] = useState(null);
  const [model, setModel] = useState("");
  const [waiting, setWaiting] = useState(true);
  const told = useApi(one.known ? null : `${one.path}/models`, waiting ? READY_S : 0);
  const found = one.known ? { value: one.known, error: null } : told;
  const stop = useRef(null);
  const end = useRef(null);
  const before = useRef(sent ? sent.number : 0); // asked before this side was there
  const names = found.value ? found.value.models : [];
  const ready = Boolean(found.value && found.value.ready);
  useEffect(() => setWaiting(!ready), [ready]);
  const name = names.includes(model) ? model : names[0] || "";
  useEffect(() => onModel(ready ? name : ""), [ready, name]);
  useEffect(() => () => stop.current && stop.current.abort(), []);
  useEffect(() => {
    if (end.current) end.current.scrollTop = end.current.scrollHeight;
  });
  useEffect(() => {
    if (sent && sent.number > before.current) answer();
  }, [sent && sent.number]);

  async function answer() {
    const question = { role: "user", content: sent.text };
    const asked = [...talk, question];
    const reply = { role: "assistant", content: "", began: performance.now(), first: null, last: null, tokens: 0, ended: null };
    let frame = 0;
    const draw = () => {
      frame = frame || requestAnimationFrame(() => {
        frame = 0;
        setTalk([...asked, { ...reply }]);
      });
    };
    stop.current = new AbortController();
    setError(null);
    onBusy(true);
    draw();
    try {
      const messages = asked.filter((message) => !message.failed).map(({ role, content }) => ({ role, content }));
      const whole = await events(`${one.path}/chat`, chatBody(name, system, messages, parameters, plain), stop.current.signal, (event) => {
        if (event.error) throw new ApiError(502, event.error.message || "The model failed.", "");
        const choice = (event.choices && event.choices[0]) || {};
        const piece = choice.text || (choice.delta && choice.delta.content);
        if (piece) {
          reply.last = performance.now();
          reply.first = reply.first || reply.last;
          reply.tokens += 1;
          reply.content += piece;
        }
        if (event.usage && event.usage.completion_tokens) reply.tokens = event.usage.completion_tokens;
        draw();
      });
      if (!whole) throw new ApiError(0, "The answer broke off: the model's server does not answer.", "Try again.");
    } catch (problem) {
      if (problem.name !== "AbortError") {
        setError(problem instanceof ApiError ? problem : new ApiError(0, "The server does not answer.", "Try again."));
        reply.failed = question.failed = !reply.content; // not a part of what is asked next
      }
    }
    reply.ended = performance.now();
    cancelAnimationFrame(frame);
    setTalk([...asked, { ...reply }]);
    onBusy(false);
  }

  const busy = talk.length > 0 && talk[talk.length - 1].ended === null;
  return html`<${Card}>
    <header class="side-head"><label><span class="visually-hidden">Model ${index + 1}</span><select value=${one.key} onChange=${(event) => choose(event.target.value)}>
      ${(served.includes(one) ? served : [one, ...served]).map((other) => html`<option key=${other.key} value=${other.key}>${other.label}</option>`)}</select></label>
      ${names.length > 1 ? html`<label><span class="visually-hidden">Name</span><select value=${name} onChange=${(event) => setModel(event.target.value)}>${names.map((other) => html`<option key=${other} value=${other}>${other}</option>`)}</select></label>` : html`<span class="muted">${name}</span>`}
      ${ready ? null : html`<span class="state busy">${found.value ? found.value.note : "asking"}</span>`}
      ${busy ? html`<button onClick=${() => stop.current.abort()}>Stop</button>` : null}</header>
    <div class="talk" ref=${end} tabindex="0" role="log" aria-label=${`Conversation with ${name || "the model"}`}>
      ${talk.length ? null : html`<p class="muted">What ${name || "the model"} answers shows here.</p>`}
      ${talk.filter((message) => message.role === "user" || !message.failed).map((message, at) => html`<div key=${at} class=${`message ${message.role}`}><p>${message.content || (message.ended === null ? "…" : "(no text)")}</p>
        ${message.role === "assistant" && message.first ? html`<span class="muted tabular small">first token ${duration((message.first - message.began) / 1000)}, ${speed(message)}, ${message.tokens} tokens</span>` : null}</div>`)}
    </div>
    <${Problem} error=${error || (found.error && !talk.length ? found.error : null)} />
  </${Card}>`;
}

const TOGETHER_S = 0.02;

// Pure: after the first token, which waits for the prompt; where all came in one piece, with it.
export function speed(message, now = performance.now()) {
  const after = ((message.last || now) - message.first) / 1000;
  if (message.tokens < 2) return "–";
  return after > TOGETHER_S ? `${((message.tokens - 1) / after).toFixed(1)} tokens/s` : `${((1000 * message.tokens) / (message.last - message.began)).toFixed(1)} tokens/s`;
}
