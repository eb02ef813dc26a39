// Every job group, and one of them: its tasks, each a job on a cluster of its own, that run together.

import { html } from "../vendor/preact-htm.js";
import { request } from "../api.js";
import { refresh, useApi, useNow } from "../state.js";
import { Link, go } from "../router.js";
import { Action, Card, Code, Empty, Loaded, State, Table, useTitle } from "../parts/elements.js";
import { ago, clock } from "../format.js";

const LOOK_S = 5; // the end of a group is in no stream; those of its jobs are
const open = (group) => group.state === "STARTING" || group.state === "RUNNING";

export function Groups() {
  useTitle("Job groups");
  const now = useNow(5000);
  const all = useApi("/v1/groups", LOOK_S);
  return html`<div class="heading"><h1>Job groups</h1></div><${Card}><${Loaded} from=${all}>${(value) => (value.groups.length ? html`<${Table} caption="Job groups" rows=${value.groups.map((one) => ({ ...one, key: `${one.name} ${one.created}` }))}
    onOpen=${(one) => go(`/groups/${one.name}`)} columns=${[
      { title: "Name", cell: (one) => html`<${Link} to=${`/groups/${one.name}`}>${one.name}</${Link}>` },
      { title: "State", cell: (one) => html`<${State} state=${one.state} />` },
      { title: "Tasks", cell: (one) => one.tasks.map((task) => task.name).join(", ") },
      { title: "Owner", cell: (one) => one.user, minor: true },
      { title: "Created", cell: (one) => ago(one.created, now), minor: true },
      { title: "Why", cell: (one) => html`<span class="muted">${one.reason}</span>`, minor: true },
    ]} />` : html`<${Empty} title="No job groups"><p>The tasks of a group run at the same time, each on a cluster of its own; none starts before all hosts are up.</p>
      <${Code}>podway launch group.yaml</${Code}></${Empty}>`)}</${Loaded}></${Card}>`;
}

export function JobGroupView({ name, session }) {
  useTitle(name);
  const now = useNow(5000);
  const path = `/v1/groups/${encodeURIComponent(name)}`;
  const group = useApi(path, LOOK_S);
  const cancel = async () => {
    await request("POST", `${path}/cancel`);
    refresh((one) => one.startsWith("/v1/groups"));
  };
  return html`<${Loaded} from=${group}>${(one) => html`
    <div class="heading"><h1>${one.name} <${State} state=${one.state} /></h1>
      ${session.role !== "viewer" && open(one) ? html`<div class="buttons"><${Action} label="Cancel" danger=${true} question=${`Cancel every job of ${one.name}? Their clusters go.`} confirm="Cancel the group" act=${cancel} /></div>` : null}</div>
    ${one.reason ? html`<p class="muted">${one.reason}</p>` : null}
    <p class="muted">Launched by ${one.user} <span title=${clock(one.created)}>${ago(one.created, now)}</span>.</p>
    <${Card} title="Tasks"><${Table} caption="Tasks" rows=${one.tasks.map((task) => ({ ...task, key: task.name }))}
      onOpen=${(task) => go(task.job === null ? `/clusters/${task.cluster}` : `/clusters/${task.cluster}/jobs/${task.job}`)} columns=${[
        { title: "Task", cell: (task) => (task.job === null ? task.name : html`<${Link} to=${`/clusters/${task.cluster}/jobs/${task.job}`}>${task.name}</${Link}>`) },
        { title: "State", cell: (task) => html`<${State} state=${task.state} />` },
        { title: "Role", cell: (task) => (task.primary ? "primary" : "ends after the primary ones"), minor: true },
        { title: "Cluster", cell: (task) => html`<${Link} to=${`/clusters/${task.cluster}`}>${task.cluster}</${Link}>` },
        ...(one.tasks.some((task) => task.reason) ? [{ title: "Why", cell: (task) => html`<span class="muted">${task.reason}</span>` }] : []),
      ]} /></${Card}>`}</${Loaded}>`;
}
