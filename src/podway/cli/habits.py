"""What people of SkyPilot, dstack, XPK, kubectl, gcloud and Slurm type: done where Podway does the same, else answered with the command
to type.

`WORDS` are replaced before the command line is read; `ANSWERS` are what is said of the rest. `DROPPED` are options that ask for what
Podway does anyway, and `OPTION_ANSWERS` what is said of others. Imported only for a command or option that Podway does not have.
"""

# The first words of a command line -> what they are here. The longest that fits counts.
WORDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("sky",): (),  # the other tool's own name, typed out of habit
    ("dstack",): (),
    ("jobs", "launch"): ("launch", "--down"),  # a cluster of its own, which ends with the job
    ("jobs", "queue"): ("queue",),
    ("jobs", "pool"): ("pool",),
    ("jobs", "pool", "ls"): ("pool", "list"),
    ("api", "info"): ("server", "status"),
    ("api", "login"): ("login",),
    ("api", "logout"): ("logout",),
    ("api", "logs"): ("server", "logs"),
    ("api", "server_logs"): ("server", "logs"),
    ("api", "start"): ("server", "start"),
    ("api", "status"): ("server", "status"),
    ("api", "stop"): ("server", "stop"),
    ("audit",): ("server", "audit"),
    ("cluster-info",): ("server", "status"),
    ("compute", "tpus", "tpu-vm", "list"): ("status",),
    ("compute", "tpus", "accelerator-types", "list"): ("tpus",),
    ("compute", "tpus", "queued-resources", "list"): ("status",),
    ("cost-report",): ("cost",),
    ("dashboard",): ("ui",),
    ("delete",): ("down",),
    ("delete", "pod"): ("down",),
    ("describe",): ("status", "-v"),
    ("describe", "pod"): ("status", "-v"),
    ("destroy",): ("down",),
    ("fleet",): ("pool", "list"),
    ("fleet", "delete"): ("pool", "down"),
    ("fleet", "get"): ("pool", "status"),
    ("fleet", "list"): ("pool", "list"),
    ("get", "clusters"): ("status",),
    ("get", "jobs"): ("queue",),
    ("get", "nodes"): ("status", "-v"),
    ("get", "pods"): ("status", "-v"),
    ("get", "services"): ("services",),
    ("get", "svc"): ("services",),
    ("gpus", "list"): ("tpus",),
    ("group", "list"): ("group", "status"),
    ("group", "ls"): ("group", "status"),
    ("hosts",): ("status", "-v"),
    ("info",): ("server", "status"),
    ("inspector",): ("doctor", "gke"),
    ("instances",): ("status", "-v"),
    ("job", "ls"): ("queue",),
    ("job", "list"): ("queue",),
    ("list",): ("status",),
    ("ls",): ("status",),
    ("metrics",): ("top",),
    ("nodes",): ("status", "-v"),
    ("offer",): ("tpus",),
    ("offers",): ("tpus",),
    ("pause",): ("stop",),
    ("pool", "delete"): ("pool", "down"),
    ("pool", "ls"): ("pool", "list"),
    ("price",): ("tpus",),
    ("prices",): ("tpus",),
    ("pricing",): ("tpus",),
    ("resume",): ("start",),
    ("rm",): ("down",),
    ("rollout", "status"): ("service", "status"),
    ("rollout", "undo"): ("service", "rollback"),
    ("schedule", "ls"): ("schedule", "list"),
    ("schedule", "rm"): ("schedule", "delete"),
    ("service", "delete"): ("service", "down"),
    ("service", "list"): ("services",),
    ("service", "ls"): ("services",),
    ("shell",): ("ssh",),
    ("show-gpus",): ("tpus",),
    ("show-tpus",): ("tpus",),
    ("sinfo",): ("status",),
    ("squeue",): ("queue",),
    ("terminate",): ("down",),
    ("tpu-vm", "list"): ("status",),
    ("users", "list"): ("server", "users"),
    ("users", "ls"): ("server", "users"),
    ("volume", "ls"): ("volume", "list"),
    ("volume", "rm"): ("volume", "delete"),
    ("volumes", "delete"): ("volume", "delete"),
    ("volumes", "list"): ("volume", "list"),
    ("volumes", "ls"): ("volume", "list"),
    ("workload", "list"): ("status",),
    ("whoami",): ("server", "status"),
    ("zones",): ("tpus",),
}

_LAUNCH = "Type: podway launch -c NAME --tpus v6e-16 'COMMAND'"
_GATEWAY = "This machine's server starts a gateway with its first service; podway services shows its address"
_SECRETS = "Secrets are given to a task: podway launch --secret NAME=VALUE FILE, or --secret-file FILE"
_COPY = "Host names work in scp and rsync: scp FILE CLUSTER:, rsync -a DIR CLUSTER: (podway ssh CLUSTER opens a shell)"

# The first words -> what to type instead.
ANSWERS: dict[tuple[str, ...], str] = {
    ("api",): "The server is managed with: podway server status|start|stop|logs, and podway login URL",
    (
        "auth",
    ): "Log in to Google Cloud with: gcloud auth application-default login. Type: podway doctor gcp to check it",
    ("batch",): "Type: podway launch 'bash SCRIPT', or podway launch FILE with a task file",
    ("catalog",): "Type: podway tpus",
    ("chat",): "Talk to the model of a service in the page: podway ui",
    (
        "cluster",
    ): "Clusters of Kubernetes are made by gcloud. Type: podway gke prepare, and podway gke node-pool create v6e-16",
    ("code",): "Type: podway dev -c NAME --ide vscode --tpus v6e-8",
    ("completions",): "Type: podway completion bash|zsh|fish",
    ("compute",): f"{_LAUNCH}, podway ssh NAME, podway down NAME",
    ("config",): "There is no config file. Log in to a team's server with: podway login URL",
    ("cp",): _COPY,
    ("cpunode",): "Type: podway dev --infra gcp (a machine without a TPU), or podway launch --infra local 'COMMAND'",
    ("create",): _LAUNCH,
    ("cron",): "Type: podway apply -f FILE with a schedule in it; podway schedule list shows what starts when",
    ("estimate",): "Type: podway plan train MODEL, or podway launch --dryrun FILE for the offers of a task",
    ("event",): "Each cluster and service has its history in the page: podway ui",
    ("events",): "Each cluster and service has its history in the page: podway ui",
    ("fleet", "create"): "Type: podway apply -f FILE with a file of type: fleet, or podway pool apply -p NAME FILE",
    ("gateway", "apply"): _GATEWAY,
    ("gateway", "create"): _GATEWAY,
    ("gateway", "delete"): "The gateway ends with the last service: podway service down NAME",
    ("gateway", "list"): _GATEWAY,
    ("gateway", "logs"): "Its log is gateway/gateway.log in PODWAY_HOME; podway gateway usage shows what was used",
    ("get",): "Type: podway status, podway queue, podway services, podway pool list or podway volume list",
    ("gpunode",): "Type: podway dev -c NAME --tpus v6e-8",
    ("gpus",): "Type: podway tpus",
    ("init",): "Nothing needs to be initialised. Type: podway launch FILE, in the directory of the task",
    ("job",): "Type: podway queue, podway logs CLUSTER JOB or podway cancel CLUSTER JOB",
    ("jobs",): "Every job is managed: podway launch, queue, logs and cancel",
    (
        "jobs",
        "cancel",
    ): "Jobs are numbered on their cluster. Type: podway cancel CLUSTER [JOB]... (podway queue lists them)",
    ("jobs", "dashboard"): "Type: podway ui",
    ("jobs", "logs"): "Jobs are numbered on their cluster. Type: podway logs CLUSTER [JOB] (podway queue lists them)",
    ("jupyter",): "Type: podway dev -c NAME --jupyter --tpus v6e-8",
    ("kill",): "Type: podway cancel CLUSTER [JOB] to end jobs, or podway down CLUSTER to delete the cluster",
    ("kind",): "A slice is simulated on this machine by: podway launch --infra local --tpus v6e-16 'COMMAND'",
    ("local",): "A slice is simulated on this machine by: podway launch --infra local --tpus v6e-16 'COMMAND'",
    ("machines",): "Type: podway status -v; machines of your own are listed in PODWAY_HOME/ssh: podway doctor ssh",
    ("models",): "Type: podway plan train MODEL, with a name of docs/models.md, a Hugging Face id or a config.json",
    ("notebook",): "Type: podway dev -c NAME --jupyter --tpus v6e-8",
    ("optimize",): "Type: podway plan train MODEL, or podway launch --dryrun FILE for the offers of a task",
    ("plan",): "Type: podway plan train MODEL, podway plan finetune MODEL or podway plan serve MODEL",
    ("pool", "create"): "Type: podway pool apply -p NAME FILE",
    (
        "pool",
        "logs",
    ): "A worker is a cluster, named after the pool. Type: podway logs POOL-1 (podway pool status lists them)",
    ("port-forward",): "Type: podway attach CLUSTER (the ports of its file), or ssh -L 8080:localhost:80 CLUSTER",
    ("project",): "Projects are kept on the server. Type: podway server members, and podway server member PROJECT USER",
    ("quota",): "Type: podway doctor gcp; a launch shows the quota that keeps a zone from being used",
    ("restart",): "Type: podway stop NAME, then podway start NAME; a job begins again with podway exec NAME FILE",
    ("rollout",): "Type: podway service status|update|rollback NAME",
    ("rsync",): _COPY,
    ("sbatch",): "Type: podway launch -d FILE, or podway launch -d 'bash SCRIPT'",
    ("scale",): "Type: podway service scale NAME 3, or podway pool apply -p NAME --workers 3",
    ("scancel",): "Jobs are numbered on their cluster. Type: podway cancel CLUSTER [JOB]... (podway queue lists them)",
    ("scp",): _COPY,
    ("secret",): _SECRETS,
    ("secrets",): _SECRETS,
    ("srun",): _LAUNCH,
    (
        "storage",
    ): "Buckets are named in file_mounts of a task, and stay where they are; list yours with: gcloud storage ls",
    ("submit",): "Type: podway launch FILE (-d returns once the job is submitted)",
    ("token",): "Type: podway server token USER; podway server users lists tokens, podway server revoke ends them",
    ("tokens",): "Type: podway server users",
    ("tpu-vm",): f"{_LAUNCH}, podway ssh NAME, podway down NAME",
    ("tpunode",): "Type: podway dev -c NAME --tpus v6e-8",
    ("upgrade",): "Type: pip install --upgrade podway",
    ("user",): "Type: podway server users",
    ("users",): "Type: podway server users",
    ("volume", "apply"): "Type: podway apply -f FILE with a file of type: volume, or podway volume create NAME",
    ("volume", "get"): "Type: podway volume list",
    ("volumes",): "Type: podway volume list|create|delete, or podway apply -f FILE with a file of type: volume",
    ("vscode",): "Type: podway dev -c NAME --ide vscode --tpus v6e-8",
    ("wait",): "Type: podway logs CLUSTER JOB, which follows the job to its end and exits with 0 if it succeeded",
    ("workload",): "Type: podway launch --infra k8s -c NAME --tpus v6e-16 'COMMAND', and podway down NAME",
    ("workspace",): "Type: podway server members (projects keep teams apart)",
    ("workspaces",): "Type: podway server members (projects keep teams apart)",
}

_ALL_SHOWN = ("-u", "--all-users")
# command -> options of other tools that ask for what it does anyway; an argument that follows one is left for the command.
DROPPED: dict[str, tuple[str, ...]] = {
    "check": ("-v", "--verbose"),
    "cost": ("-a", "--all", *_ALL_SHOWN),
    "login": ("-e", "--endpoint", "--url"),
    "logs": ("-f",),
    "pool list": ("-v", "--verbose", "-a", "--all"),
    "queue": (*_ALL_SHOWN, "-v", "--verbose", "--refresh", "-r"),
    "start": ("-f", "--force"),
    "status": (
        *_ALL_SHOWN,
        "--show-managed-jobs",
        "--no-show-managed-jobs",
        "--show-services",
        "--no-show-services",
    ),
    "ps": _ALL_SHOWN,
    "tpus": ("-a", "--all", "--all-regions", "--gpu", "--accelerator"),
}

_TAKES_TASK = ("launch", "apply", "dev", "exec")
_IN_FILE = "Name it in the file: "
# Of every command that takes a task.
_TASK_ANSWERS: dict[str, str] = {
    "--accelerator-type": "Type: --tpus v6e-8",
    "--async": "Type: -d (return once the job is submitted)",
    "--backend": "Type: --infra gcp",
    "--clone-disk-from": "Keep files on a volume (podway volume create NAME), or in a bucket of file_mounts",
    "--config": "Name it in the file of the task, or in gcp.yaml and gke.yaml of PODWAY_HOME",
    "--cpus": "A slice is chosen by its type. Type: --tpus v6e-8",
    "--detach-setup": "Type: -d (return once the job is submitted); setup is part of the job",
    "--disk-size": f"{_IN_FILE}resources: {{disk_size: 200}}",
    "--docker-image": "Type: --image NAME",
    "--dry-run": "Type: --dryrun",
    "--fleet": "Type: --pool NAME",
    "--git-url": "Name the repository in the file: workdir: {url: ..., ref: ...}, or repos of a dstack file",
    "--gpu": "Type: --tpus v6e-8",
    "--json": "Type: -o json",
    "--instance-type": "A slice is chosen by its type. Type: --tpus v6e-8",
    "--max-duration": f"{_IN_FILE}max_duration: 6h (dstack)",
    "--max-price": f"{_IN_FILE}resources: {{max_hourly_cost: 20}}, or max_price: 20 (dstack)",
    "--max-restarts": f"{_IN_FILE}resources: {{job_recovery: {{max_restarts_on_errors: 3}}}}",
    "--memory": "A slice is chosen by its type. Type: --tpus v6e-8",
    "--nodes": "Type: --num-nodes N (slices)",
    "--num-slices": "Type: --num-nodes N (slices)",
    "--ports": "Name them in the file: ports: [8080]. podway attach CLUSTER forwards them to this machine",
    "--profile": "Profiles are not read: name what it says in the file, or give it as options",
    "--reservation": f"{_IN_FILE}resources: {{accelerator_args: {{reservation: NAME}}}}",
    "--retry": "Type: --retry-until-up",
    "--spot": "Type: --use-spot",
    "--spot-policy": "Type: --use-spot or --no-use-spot",
    "--tpu-type": "Type: --tpus v6e-8",
    "--wait-for": "Jobs and people who are connected both keep a cluster from being idle",
}
_SHELL = "Type: podway ssh CLUSTER (a shell), or podway run CLUSTER 'COMMAND' (on every host at once)"
_ENDPOINTS = "podway services shows the URL of a service; podway attach CLUSTER forwards the ports of a cluster"
_BY_ITSELF = "Changes show by themselves in the page: podway ui"
_DIAGNOSE = "Why a job did not start is shown by: podway status -v CLUSTER"

# (command, option) -> what to type instead.
OPTION_ANSWERS: dict[tuple[str, str], str] = {
    ("apply", "-e"): "Type: --env NAME=VALUE",
    ("apply", "--force"): "A file without changes changes nothing. To begin again: podway down NAME, then apply it",
    ("apply", "--max-offers"): "All offers that count are shown",
    ("apply", "-P"): "Profiles are not read: name what it says in the file, or give it as options",
    ("attach", "--host"): "Ports are forwarded to 127.0.0.1; for others: ssh -g -L 8080:localhost:8080 CLUSTER",
    ("attach", "--logs"): "The log is shown without it.",
    ("attach", "--port"): "Name the ports in the file: ports: [8080]; or type: ssh -L 8080:localhost:8080 CLUSTER",
    ("attach", "--replica"): "A replica is a cluster: podway service status NAME lists them",
    ("autostop", "-a"): "Name the cluster: podway autostop CLUSTER -i 30",
    ("autostop", "--all"): "Name the cluster: podway autostop CLUSTER -i 30",
    ("autostop", "--wait-for"): "Jobs and people who are connected both keep a cluster from being idle",
    ("cancel", "-n"): "Jobs are numbered on their cluster: podway queue lists them with their names",
    ("cancel", "--name"): "Jobs are numbered on their cluster: podway queue lists them with their names",
    ("cancel", "-u"): "Type: podway cancel CLUSTER --all",
    ("down", "-f"): "Type: podway down NAME, with a name of podway status; of a service: podway service down NAME",
    ("down", "-u"): "Type: podway down --all (all clusters that you may delete)",
    ("down", "--all-users"): "Type: podway down --all (all clusters that you may delete)",
    ("exec", "-i"): _SHELL,
    ("exec", "-t"): _SHELL,
    ("launch", "--fast"): "A cluster that is up is not set up again. Type: podway exec CLUSTER FILE",
    ("launch", "-s"): "Type: -d (return once the job is submitted); setup is part of the job",
    ("launch", "-t"): "A slice is chosen by its type. Type: --tpus v6e-8",
    ("logs", "-a"): "All ranks are shown, lines alike once; every line: podway logs CLUSTER --raw",
    ("logs", "-d"): _DIAGNOSE,
    ("logs", "--diagnose"): _DIAGNOSE,
    ("logs", "-n"): "Type: --tail 10",
    ("logs", "--num-lines"): "Type: --tail 10",
    ("logs", "--provision"): "What was done to get hosts is in the page: podway ui",
    ("logs", "--replica"): "Type: podway service logs NAME REPLICA",
    ("logs", "--since"): "Type: --tail 100, or --timestamps to see when each line was printed",
    ("logs", "--worker"): "Type: --rank 3",
    ("pool list", "-w"): _BY_ITSELF,
    ("pool list", "--watch"): _BY_ITSELF,
    ("ps", "-n"): "Type: podway ps -a (all of them)",
    ("ps", "--last"): "Type: podway ps -a (all of them)",
    ("ps", "-w"): _BY_ITSELF,
    ("ps", "--watch"): _BY_ITSELF,
    ("queue", "-a"): "All clusters are shown when none is named. Type: podway queue",
    ("run", "-f"): "Type: podway apply -f FILE",
    (
        "ssh",
        "--infra",
    ): "List machines of your own in PODWAY_HOME/ssh/NAME.yaml. Type: podway launch --infra ssh/NAME FILE",
    ("start", "-i"): "Type: podway autostop CLUSTER -i 30, once it is up",
    ("start", "--down"): "Type: podway autostop CLUSTER -i 30 --down, once it is up",
    (
        "start",
        "--retry-until-up",
    ): "Hosts stay where their disks are. To look elsewhere: podway down, then podway launch -r",
    ("plan train", "--model"): "Type: podway plan train MODEL (llama3.1-8b)",
    ("plan serve", "--model"): "Type: podway plan serve MODEL (llama3.1-8b)",
    ("podway", "-V"): "Type: podway --version",
    ("podway", "-v"): "Type: podway --version",
    ("status", "--endpoint"): _ENDPOINTS,
    ("status", "--endpoints"): _ENDPOINTS,
    ("status", "--kubernetes"): "Clusters on GKE are in the list of: podway status",
    ("stop", "-x"): "Type: podway cancel CLUSTER --all, or podway down CLUSTER",
    ("stop", "--abort"): "Type: podway cancel CLUSTER --all, or podway down CLUSTER",
    ("top", "-w"): "Type: watch podway top CLUSTER",
    ("top", "--watch"): "Type: watch podway top CLUSTER",
    ("tpus", "--cloud"): "Prices are Google Cloud's, by zone. Type: podway tpus v6e-8",
    ("tpus", "--infra"): "Prices are Google Cloud's, by zone. Type: podway tpus v6e-8",
    ("tpus", "--zone"): "Prices are Google Cloud's, by zone. Type: podway tpus v6e-8",
    ("ui", "--port"): "The page is on the port of the server: podway server status shows it",
}
_LONGEST = 4


def translated(words: list[str]) -> list[str] | None:
    """The same command line in Podway's words, if it is one that another tool has."""
    if words[0] == "help":
        return [*words[1:], "--help"]
    for length in range(min(_LONGEST, len(words)), 0, -1):
        first, rest = tuple(words[:length]), words[length:]
        if first in ANSWERS:
            return None
        if first in WORDS and (WORDS[first] or rest):
            return [*WORDS[first], *rest]
    return None


def answer(words: list[str]) -> str:
    """What to type instead, or nothing."""
    return next((ANSWERS[tuple(words[:length])] for length in (2, 1) if tuple(words[:length]) in ANSWERS), "")


def without_option(arguments: list[str], command: str, option: str) -> list[str] | None:
    """The command line without an option that asks for what the command does anyway, or with Podway's word for it."""
    place = next((at for at, word in enumerate(arguments) if word == option or word.startswith(f"{option}=")), None)
    if place is None or "--" in arguments[:place]:
        return None
    if option == "--json" and arguments[place] == option and command not in (*_TAKES_TASK, "run", "ssh"):
        return [*arguments[:place], "-o", "json", *arguments[place + 1 :]]
    if option not in DROPPED.get(command, ()):
        return None
    value = arguments[place].partition("=")[2]
    return [*arguments[:place], *([value] if value else []), *arguments[place + 1 :]]


def option_answer(command: str, option: str) -> str:
    """What to type instead of an option, or nothing."""
    return OPTION_ANSWERS.get((command, option)) or (_TASK_ANSWERS.get(option, "") if command in _TAKES_TASK else "")
