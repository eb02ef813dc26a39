"""What the fingers of SkyPilot and dstack users type: done where Podway does the same, else answered with the command to type.

`WORDS` are replaced before the command line is read; `ANSWERS` and `OPTION_ANSWERS` are what is said of the rest. Imported only for a
command or option that Podway does not have.
"""

# The first words of a command line -> what they are here. The longest that fits counts.
WORDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("jobs", "launch"): ("launch", "--down"),  # a cluster of its own, which ends with the job
    ("jobs", "queue"): ("queue",),
    ("jobs", "pool"): ("pool",),
    ("jobs", "pool", "ls"): ("pool", "list"),
    ("api", "info"): ("server", "status"),
    ("api", "login"): ("login",),
    ("api", "logout"): ("logout",),
    ("api", "logs"): ("server", "logs"),
    ("api", "start"): ("server", "start"),
    ("api", "status"): ("server", "status"),
    ("api", "stop"): ("server", "stop"),
    ("cost-report",): ("cost",),
    ("dashboard",): ("ui",),
    ("delete",): ("down",),
    ("fleet",): ("pool", "list"),
    ("fleet", "delete"): ("pool", "down"),
    ("fleet", "get"): ("pool", "status"),
    ("fleet", "list"): ("pool", "list"),
    ("gpus", "list"): ("tpus",),
    ("list",): ("status",),
    ("ls",): ("status",),
    ("metrics",): ("top",),
    ("offer",): ("tpus",),
    ("show-gpus",): ("tpus",),
    ("show-tpus",): ("tpus",),
    ("users", "ls"): ("server", "users"),
    ("volumes", "delete"): ("volume", "delete"),
    ("volumes", "ls"): ("volume", "list"),
}

# The first words -> what to type instead.
ANSWERS: dict[tuple[str, ...], str] = {
    ("api",): "The server is managed with: podway server status|start|stop|logs, and podway login URL",
    ("completions",): "Type: podway completion bash|zsh|fish",
    ("config",): "There is no config file. Log in to a team's server with: podway login URL",
    ("cpunode",): "Type: podway dev --infra gcp (a machine without a TPU), or podway launch --infra local 'COMMAND'",
    ("cron",): "Type: podway apply -f FILE with a schedule in it; podway schedule list shows what starts when",
    ("event",): "Each cluster and service has its history in the page: podway ui",
    ("gpunode",): "Type: podway dev -c NAME --tpus v6e-8",
    ("gpus",): "Type: podway tpus",
    ("init",): "Nothing needs to be initialised. Type: podway launch FILE, in the directory of the task",
    ("jobs",): "Every job is managed: podway launch, queue, logs and cancel",
    (
        "jobs",
        "cancel",
    ): "Jobs are numbered on their cluster. Type: podway cancel CLUSTER [JOB]... (podway queue lists them)",
    ("jobs", "dashboard"): "Type: podway ui",
    ("jobs", "logs"): "Jobs are numbered on their cluster. Type: podway logs CLUSTER [JOB] (podway queue lists them)",
    ("local",): "A slice is simulated on this machine by: podway launch --infra local --tpus v6e-16 'COMMAND'",
    ("project",): "Projects are kept on the server. Type: podway server members, and podway server member PROJECT USER",
    ("secret",): "Secrets are given to a task: podway launch --secret NAME=VALUE FILE, or --secret-file FILE",
    ("secrets",): "Secrets are given to a task: podway launch --secret NAME=VALUE FILE, or --secret-file FILE",
    (
        "storage",
    ): "Buckets are named in file_mounts of a task, and stay where they are; list yours with: gcloud storage ls",
    ("tpunode",): "Type: podway dev -c NAME --tpus v6e-8",
    ("user",): "Type: podway server users",
    ("users",): "Type: podway server users",
    ("volumes",): "Type: podway volume list|create|delete, or podway apply -f FILE with a file of type: volume",
    ("workspace",): "Type: podway server members (projects keep teams apart)",
}

# (command, option) -> what to type instead.
OPTION_ANSWERS: dict[tuple[str, str], str] = {
    ("attach", "--logs"): "The log is shown without it.",
    ("launch", "--fast"): "A cluster that is up is not set up again. Type: podway exec CLUSTER FILE",
    ("launch", "--disk-size"): "Name it in the file: resources: {disk_size: 200}",
    ("launch", "--instance-type"): "A slice is chosen by its type. Type: --tpus v6e-8",
    ("launch", "--ports"): "Name them in the file: ports: [8080]. podway attach CLUSTER forwards them to this machine",
    ("launch", "--async"): "Type: -d (return once the job is submitted)",
    ("logs", "-d"): "Why a job did not start is shown by: podway status -v CLUSTER",
    ("logs", "--diagnose"): "Why a job did not start is shown by: podway status -v CLUSTER",
    ("logs", "--provision"): "What was done to get hosts is in the page: podway ui",
    ("ps", "-w"): "Changes show by themselves in the page: podway ui",
    ("ps", "--watch"): "Changes show by themselves in the page: podway ui",
    ("queue", "-a"): "All clusters are shown when none is named. Type: podway queue",
    (
        "status",
        "--endpoint",
    ): "podway services shows the URL of a service; podway attach CLUSTER forwards the ports of a cluster",
    (
        "status",
        "--endpoints",
    ): "podway services shows the URL of a service; podway attach CLUSTER forwards the ports of a cluster",
    ("status", "--kubernetes"): "Clusters on GKE are in the list of: podway status",
}


def translated(words: list[str]) -> list[str] | None:
    """The same command line in Podway's words, if it is one that another tool has."""
    for length in (3, 2, 1):
        if tuple(words[:length]) in WORDS:
            return [*WORDS[tuple(words[:length])], *words[length:]]
    return None


def answer(words: list[str]) -> str:
    """What to type instead, or nothing."""
    return next((ANSWERS[tuple(words[:length])] for length in (2, 1) if tuple(words[:length]) in ANSWERS), "")
