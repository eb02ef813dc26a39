"""What a dstack run brings along: repos, files, volumes. Local paths are relative to the file that names them."""

import posixpath
import re

from podway.task.fields import Field
from podway.task.mounts import git, mount_target, settled
from podway.task.paths import LocalMachine
from podway.task.task import FileMount, Git, LocalDir, Volume
from podway.task.volumes import for_node

_GIT_ADDRESS = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*://|[^/:@]+@)[^:]*(?::[0-9]+/[^:]*|:[^/:][^:]*)?)(?::(.+))?")


def read_repos(field: Field, local: LocalMachine, notes: list[str]) -> tuple[LocalDir | Git | None, list[FileMount]]:
    """(what goes into the working directory, what goes elsewhere)."""
    repos = field.items()
    if len(repos) > 1:
        raise repos[1].error("a run takes one repository", "bring others along with git clone in `commands`")
    if not repos:
        return None, []
    source, path = _repo_mapping(repos[0], local, notes) if repos[0].is_mapping else _repo_text(repos[0], local)
    if path in ("", "."):
        return source, []
    return None, [FileMount(target=mount_target(repos[0], path), source=source)]


def _repo_mapping(field: Field, local: LocalMachine, notes: list[str]) -> tuple[LocalDir | Git, str]:
    path, url, at = field.get("local_path"), field.get("url"), field.get("path")
    branch, commit = field.get("branch"), field.get("hash")
    target = at.words() if at else "."
    if (path is None) == (url is None):
        raise field.error("a repository has either a local_path or a url", "keep one of them")
    if url:
        return Git(
            url=url.words(), ref=branch.words() if branch else None, hash=commit.words() if commit else None
        ), target
    assert path is not None
    for unused in filter(None, (branch, commit)):
        notes.append(f"{unused.path}: a local directory is synced as it is")
    return LocalDir(path=local.existing(path, path.words(), directory=True)), target


def _repo_text(field: Field, local: LocalMachine) -> tuple[LocalDir | Git, str]:
    text = field.words()
    address = _GIT_ADDRESS.fullmatch(text)
    if address and ("://" in text or "@" in text.partition(":")[0]):
        return git(address[1], None), address[2] or "."
    path, _, target = text.partition(":")
    return LocalDir(path=local.existing(field, path, directory=True)), target or "."


def read_files(field: Field, local: LocalMachine) -> list[FileMount]:
    found = []
    for one in field.items():
        if one.is_mapping:
            path, at = one.get("local_path"), one.get("path")
            assert path is not None and at is not None  # the shape requires them
            text, target = path.words(), at.words()
        else:
            text, colon, target = one.words().partition(":")
            if ":" in target or (colon and not target):
                raise one.error(f"{one.found} is not local:remote", "write one colon between the two paths")
            if not target and settled(text) is None:
                name = posixpath.basename(text.rstrip("/"))
                raise one.error(f"{one.found} lies above the home on a host", f"say where it goes: {text}:{name}")
            target = target or text
        source = LocalDir(path=local.existing(one, text))
        found.append(FileMount(target=mount_target(one, target), source=source))
    return found


def read_dstack_volumes(field: Field) -> list[Volume]:
    found = []
    for one in field.items():
        name = host = None
        optional = False
        others: tuple[str, ...] = ()
        if one.is_mapping:
            at, named, host_path = one.get("path"), one.get("name"), one.get("instance_path")
            assert at is not None  # the shape requires it
            if (named is None) == (host_path is None):
                raise one.error("a volume has either a name or an instance_path", "keep one of them")
            names = (
                [each.words() for each in named.items()]
                if named and named.is_list
                else [named.words()]
                if named
                else []
            )
            name, others = next(iter(names), None), tuple(names[1:])
            host, path = host_path.words() if host_path else None, at.words()
            flag = one.get("optional")
            optional = flag.flag() if flag else False
        else:
            source, _, path = one.words().partition(":")
            name, host = (None, source) if "/" in source else (source, None)
        _check_volume(one, (name, *others), host, path)
        host = posixpath.normpath(host) if host else None
        found.append(
            Volume(path=mount_target(one, path), name=name, alternatives=others, instance_path=host, optional=optional)
        )
    return found


def _check_volume(field: Field, names: tuple[str | None, ...], host: str | None, path: str) -> None:
    for name in filter(None, names):
        if "${{" in for_node(name, 0):
            raise field.error(f"`{name}` holds what is not known here", "write ${{ dstack.node_rank }} for each node")
    for part in (path, host):
        if part is not None and (not part.startswith("/") or ".." in part.split("/")):
            raise field.error(f"`{part}` is not an absolute path", "write name:/path or /host/path:/path")
    if "" in names:
        raise field.error("the volume has no name", "write name:/path")
