"""Environment variables and secrets: who wins, and where they are put into a file.

1. `supplied` reads the flags: `--env` over `--env-file`, `--secret` over `--secret-file`.
2. `settle` joins them with what the file declares. A name given by `--secret` or declared as a secret is a secret and
   nothing else; its value comes from `--secret`, `--secret-file`, `--env`, `--env-file`, the file, in this order. Any
   other name comes from `--env`, `--env-file`, the file. A declared name without a value is an error that says which flag
   to use.
3. `substitute` puts `${VAR}` and `$VAR` into parsed values, never into serialized text, so that quotes and backslashes
   survive. Unknown names stay as they are. `interpolate` does the same for dstack's `${{ ns.NAME }}`.

Secrets are not put into values: a value is stored and shown, a secret must not be. Where something can fill them in later (the
headers of a probe, an address to fetch) they stay in it by name, `${NAME}`, for `fill_secrets`; elsewhere they are refused.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from podway.errors import UserError
from podway.task import yamlfile
from podway.task.fields import Field, shorten
from podway.task.paths import absolute, read_file
from podway.task.problems import Problems
from podway.task.values import ENV_NAME

_VARIABLE = re.compile(rf"\$\{{({ENV_NAME})\}}|\$({ENV_NAME})")
_SEALED = re.compile(rf"\$\{{({ENV_NAME})\}}")
_EXPRESSION = re.compile(r"(\$?)\$\{\{(.*?)(\}\}|$)", re.DOTALL)
_DOTENV_LINE = re.compile(
    rf"""[ \t]*(?:export[ \t]+)?(?P<name>{ENV_NAME})[ \t]*
        (?:=[ \t]*(?:
            "(?P<double>(?:[^"\\]|\\.)*)"[ \t]*(?:\#[^\n]*)?
          | '(?P<single>[^']*)'[ \t]*(?:\#[^\n]*)?
          | (?P<bare>[^\n]*)
        ))?(?:\n|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line adds to or puts in place of a file's values."""

    env: tuple[str, ...] = ()  # 'K=V', or 'K' to take it from local_env
    env_files: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    secret_files: tuple[str, ...] = ()
    name: str | None = None
    tpus: str | None = None
    num_nodes: int | None = None
    use_spot: bool | None = None
    priority: int | None = None
    workdir: str | None = None
    infra: str | None = None
    image: str | None = None  # a container image in place of the file's
    ignore_image: bool = False  # run in the hosts' own environment
    run: str | None = None  # a bash command in place of the file's
    run_args: tuple[str, ...] = ()  # what followed `--`, for dstack's ${{ run.args }}
    local_env: Mapping[str, str] = {}
    cwd: str | None = None  # where the command is typed; None: the process's own

    @property
    def here(self) -> Path:
        return Path(self.cwd) if self.cwd else Path.cwd()


class Supplied(msgspec.Struct, frozen=True):
    """The variables and secrets the flags give."""

    env: dict[str, str]
    secrets: dict[str, str]


class Declared(msgspec.Struct, frozen=True):
    """A variable a file names; `value` None means somebody must give one."""

    field: Field
    value: str | None
    secret: bool = False


def supplied(overrides: Overrides) -> Supplied:
    local = overrides.local_env
    return Supplied(
        env=_from_files(overrides.env_files, overrides) | _from_flags("--env", overrides.env, local),
        secrets=_from_files(overrides.secret_files, overrides) | _from_flags("--secret", overrides.secrets, local),
    )


def settle(
    declared: Mapping[str, Declared], given: Supplied, ambient: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """(env, secrets) of the task. `ambient` supplies declared names that nothing else does (dstack's bare `- NAME`)."""
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    problems = Problems()
    for name, one in declared.items():
        secret = one.secret or name in given.secrets
        value = given.secrets.get(name, given.env.get(name, one.value))
        if value is None:
            value = ambient.get(name)
        if value is None:
            problems.found.append(_unset(name, one))
            continue
        (secrets if secret else env)[name] = _storable(one.field.error, name, value)
    for name, value in given.env.items():
        if name not in secrets and name not in given.secrets:
            env[name] = value
    problems.raise_any()
    secrets |= given.secrets
    return env, secrets


def _unset(name: str, one: Declared) -> UserError:
    if one.secret:
        return one.field.error(
            f"the secret {name} has no value", f"give it with `--secret {name}` or `--secret {name}=...`"
        )
    return one.field.error(
        f"the variable {name} has no value",
        f"give it with `--env {name}=...`, `--env {name}` (from your environment) or, to keep it hidden, `--secret {name}`",
    )


SealedAt = Callable[[tuple[str, ...], str], bool]  # (the keys above a value, the value): whether secrets may stay in it


def fill_secrets(text: str, secrets: Mapping[str, str], quote: Callable[[str], str] = str) -> str:
    """The text with the values of the secrets that `substitute` left in it by name, each as `quote` writes it."""
    return _SEALED.sub(lambda match: quote(secrets[match[1]]) if match[1] in secrets else match[0], text)


def substitute(field: Field, env: Mapping[str, str], secrets: Collection[str], sealed_at: SealedAt) -> Field:
    """The field with variables put into every text and key below it; secrets stay by name where `sealed_at` says so."""
    room = yamlfile.MAX_EXPANDED

    def replace(text: str, node: yamlfile.Node, above: tuple[str, ...] | None) -> str:
        nonlocal room
        room -= sum(len(env.get(match[1] or match[2], "")) for match in _VARIABLE.finditer(text))
        if room < 0:
            raise _grown(field, at=node)

        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            if name in secrets and above is not None and sealed_at(above, text):
                return f"${{{name}}}"
            if name in secrets:
                raise field.error(
                    f"the secret {name} cannot be used here: this part of a task is stored and shown",
                    "declare it under envs if it may be seen",
                    at=node,
                )
            return env.get(name, match[0])

        return _VARIABLE.sub(value, text)

    return Field(field.file, _map_texts(field, field.node, replace, ()), field.path)


_Replace = Callable[[str, yamlfile.Node, tuple[str, ...] | None], str]  # the keys above a value; None for a key


def _map_texts(field: Field, node: yamlfile.Node, replace: _Replace, above: tuple[str, ...]) -> yamlfile.Node:
    if isinstance(node, yamlfile.Sequence):
        items = tuple(_map_texts(field, item, replace, above) for item in node.items)
        return msgspec.structs.replace(node, items=items)
    if isinstance(node, yamlfile.Mapping):
        entries: dict[str, yamlfile.KeyValue] = {}
        for entry in node.entries.values():
            key = replace(entry.key.text, entry.key, None)
            if key in entries:
                raise field.error(
                    f"`{shorten(key)}` is given twice, once by way of a variable", "keep one", at=entry.key
                )
            entries[key] = yamlfile.KeyValue(
                msgspec.structs.replace(entry.key, text=key), _map_texts(field, entry.value, replace, (*above, key))
            )
        return msgspec.structs.replace(node, entries=entries)
    assert isinstance(node, yamlfile.Scalar)
    text = replace(node.text, node, above)
    return node if text == node.text else msgspec.structs.replace(node, text=text, kind="str")


def _grown(field: Field, at: yamlfile.Node | None = None) -> UserError:
    return field.error("too large when its variables are expanded", "use the variable in `run` instead", at=at)


def interpolate(field: Field, text: str, known: Callable[[str], str | None]) -> str:
    """dstack's `${{ name }}` replaced by what `known` answers for the name; `$${{` stands for a literal `${{`."""

    room = yamlfile.MAX_EXPANDED

    def value(match: re.Match[str]) -> str:
        nonlocal room
        name = match[2].strip()
        if not match[3]:
            raise field.error(
                "`${{` without its `}}`", "close it with `}}`, or write `$${{` for the characters themselves"
            )
        if match[1]:
            return match[0][1:]
        answer = known(name)
        if answer is None:
            raise field.error(
                f"`{shorten(match[0])}` has no value here", "correct the name, or write `$${{` to keep it as it is"
            )
        room -= len(answer)
        if room < 0:
            raise _grown(field)
        return answer

    return _EXPRESSION.sub(value, text)


def _from_flags(flag: str, words: Sequence[str], local: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not re.fullmatch(ENV_NAME, name):
            raise UserError(f"{flag} {shorten(name)}: not a variable name", f"write {flag} NAME=VALUE or {flag} NAME")
        if not equals:
            if name not in local:
                raise UserError(f"{flag} {name}: {name} is not set in your environment", f"write {flag} {name}=VALUE")
            value = local[name]
        found[name] = _storable(UserError, f"{flag} {name}", value)
    return found


def _from_files(paths: Sequence[str], overrides: Overrides) -> dict[str, str]:
    local = overrides.local_env
    found: dict[str, str] = {}
    for path in paths:
        data = read_file(absolute(path, overrides.here, local), "a file of NAME=VALUE lines", path)
        try:
            text = data.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8", "save it as UTF-8") from None
        found |= _dotenv(path, text, local)
    return found


def _dotenv(path: str, text: str, local: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        line = text[at : end if end >= 0 else len(text)]
        if not line.strip() or line.lstrip().startswith("#"):
            at += len(line) + 1
            continue
        match = _DOTENV_LINE.match(text, at)
        number = text.count("\n", 0, at) + 1
        if not match or (match["bare"] or "").startswith(("'", '"')):
            raise UserError(
                f"{path}:{number}: not a NAME=VALUE line", "write NAME=VALUE, with quotes closed, or # for a comment"
            )
        name = match["name"]
        found[name] = _storable(UserError, f"{path}:{number}: {name}", _dotenv_value(match, path, number, local, found))
        at = match.end()
    return found


def _dotenv_value(
    match: re.Match[str], path: str, number: int, local: Mapping[str, str], found: Mapping[str, str]
) -> str:
    if match["single"] is not None:
        return match["single"]
    if match["double"] is not None:
        plain = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), match["double"], flags=re.DOTALL)
    elif match["bare"] is not None:
        plain = re.sub(r"(^|[ \t])#.*", "", match["bare"]).strip()
    elif match["name"] in local:
        return local[match["name"]]
    else:
        raise UserError(
            f"{path}:{number}: {match['name']} has no value and is not set in your environment", "write NAME=VALUE"
        )
    return re.sub(rf"\$\{{({ENV_NAME})\}}", lambda m: found.get(m[1], local.get(m[1], m[0])), plain)


def _storable(error: Callable[[str, str], UserError], name: str, value: str) -> str:
    """The value, if it can be part of a process's environment and of JSON."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise error(f"{name}: the value is not UTF-8 text", "give it in UTF-8") from None
    if len(value) > yamlfile.MAX_EXPANDED:
        raise error(f"{name}: the value has {len(value):,} characters", "put it into a file and sync the file")
    if "\0" in value:
        raise error(f"{name}: the value holds a NUL character", "remove it: no environment can hold it")
    return value
