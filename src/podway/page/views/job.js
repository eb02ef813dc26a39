// One job: where it is, how each rank ended, and its log as it comes.

import { html } from "../vendor/preact-htm.js";
import { request } from "../api.js";
import { refresh, useApi, useNow } from "../state.js";
import { Link } from "../router.js";
import { Action, Card, Loaded, State, useTitle } from "../parts/elements.js";
import { LogView } from "../parts/logs.js";
import { ago, clock, duration } from "../format.js";

const ENDED = new Set(["SUCCEEDED", "FAILED", "FAILED_SETUP", "FAILED_DRIVER", "FAILED_NO_RESOURCE", "CANCELLED"]);

export function JobPage({ cluster, number, session }) {
  useTitle(`${cluster} job ${number}`);
  const now = useNow(1000);
  const path = `/v1/clusters/${encodeURIComponent(cluster)}`;
  const found = useApi(`${path}/jobs/${number}`);
  const around = useApi(path);
  const hosts = around.value ? Math.max(around.value.hosts.length, (around.value.order.slices || 1) * (around.value.order.hosts_per_slice || 1)) : 1;
  const runs = useApi("/v1/runs?past=1");
  const served = useApi("/v1/served");
  const same = (one) => one.cluster === cluster && one.job === Number(number);
  const trains = runs.value && runs.value.runs.some(same);
  const serves = served.value && served.value.served.some(same);
  const cancel = async () => {
    await request("POST", `${path}/cancel`, { jobs: [Number(number)] });
    refresh((one) => one.startsWith("/v1/clusters"));
  };
  return html`<${Loaded} from=${found}>${(job) => html`
    <div class="heading"><h1><${Link} to=${`/clusters/${cluster}`}>${cluster}</${Link}> <span class="muted">/</span> ${job.name || "job"} ${job.number} <${State} state=${job.state} /></h1>
      <div class="buttons">${trains ? html`<${Link} class="button" to=${`/training?runs=${cluster}/${number}`}>Metrics</${Link}>` : null}
        ${serves ? html`<${Link} class="button" to="/models">Chat</${Link}>` : null}
        ${session.role === "viewer" || ENDED.has(job.state) ? null : html`<${Action} label="Cancel" danger=${true} question="Cancel this job, and end every process of it?" confirm="Cancel the job" act=${cancel} />`}</div></div>
    ${job.reason ? html`<p class=${job.state.startsWith("FAILED") ? "problem" : "muted"}>${job.reason}</p>` : null}
    <p class="facts-line"><span>by <b>${job.user}</b></span><span title=${clock(job.submitted)}>submitted ${ago(job.submitted, now)}</span>
      <span>${job.started ? `${job.ended ? "ran" : "running"} for ${duration((job.ended || now) - job.started)}` : "not started"}</span>
      ${job.attempt > 1 ? html`<span>attempt ${job.attempt}</span>` : null}<span>${job.resources}</span></p>
    ${job.exits.length > 1 || job.exits.some((one) => one.code !== 0) ? html`<${Card} title="Ranks"><ol class="hosts">${job.exits.map((one) => html`
      <li key=${one.rank} class=${one.code === 0 && !one.lost ? "good" : "bad"} title=${`CPU ${duration(one.cpu_s)}, memory ${(one.max_rss / 2 ** 20).toFixed(0)} MiB`}>
        <b>${one.rank}</b><span>${one.lost ? "lost" : one.signal !== null ? `signal ${one.signal}` : `exit ${one.code}`}</span></li>`)}</ol></${Card}>` : null}
    <${Card} title="Log"><${LogView} cluster=${cluster} job=${number} hosts=${hosts} /></${Card}>`}</${Loaded}>`;
}
