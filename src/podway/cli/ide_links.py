"""Links that open a directory of a host in an editor on this machine, through the person's ssh."""

from urllib.parse import quote

# What each editor registers for; all take a name of the ssh config.
LINKS = {
    "vscode": "vscode://vscode-remote/ssh-remote+{host}{path}",
    "cursor": "cursor://vscode-remote/ssh-remote+{host}{path}",
    "windsurf": "windsurf://vscode-remote/ssh-remote+{host}{path}",
    "zed": "zed://ssh/{host}{path}",
}
NAMES = {"vscode": "VS Code", "cursor": "Cursor", "windsurf": "Windsurf", "zed": "Zed"}


def ide_link(ide: str, host: str, path: str) -> str:
    """The link, or nothing for an editor that is not known."""
    return LINKS[ide].format(host=quote(host, safe=""), path=quote(path)) if ide in LINKS else ""
