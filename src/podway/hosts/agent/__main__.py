"""The agent's command line: `serve`, `call`, `sftp` and, for its own use, `runner` and `enter`.

python3 agent.pyz serve --home DIR [--address IP] [--daemon]     run this host's agent
python3 agent.pyz call --home DIR                                requests on stdin, replies on stdout
python3 agent.pyz sftp                                           an SFTP server on stdin and stdout
python3 agent.pyz runner STATE JOB PHASE                         run one phase (the agent starts these)
python3 agent.pyz enter                                          become a process of a container (the runner starts these)
"""

from __future__ import annotations

import sys

USAGE = "usage: agent.pyz serve --home DIR [--address IP] [--daemon] | call --home DIR"


def main(arguments: list[str], version: str) -> int:
    """Do what the command line says; the exit status. `version` is the hash of the bundle's sources."""
    # Each mode imports only its own: a runner is started for every phase of every job, and its start is waited for.
    if len(arguments) == 4 and arguments[0] == "runner":
        from . import runner

        runner.main(*arguments[1:])
        return 0
    if arguments == ["enter"]:
        from . import enter

        enter.main()
    if arguments == ["sftp"]:
        from . import sftp

        return sftp.main()
    options = _options(arguments[1:])
    if not arguments or options is None or "--home" not in options:
        print(USAGE, file=sys.stderr)
        return 2
    if arguments[0] == "serve":
        from . import serve

        identity = serve.Identity(options["--home"], options.get("--address", ""), sys.argv[0], version)
        return serve.serve(identity, "--daemon" in options)
    if arguments[0] == "call":
        from . import relay

        return relay.relay(options["--home"])
    print(USAGE, file=sys.stderr)
    return 2


def _options(words: list[str]) -> dict[str, str] | None:
    found = {}
    rest = iter(words)
    for word in rest:
        if word == "--daemon":
            found[word] = ""
        elif word in ("--home", "--address"):
            value = next(rest, None)
            if value is None:
                return None
            found[word] = value
        else:
            return None
    return found
