"""Variables and secrets: precedence, required ones, env files, substitution."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.control.probing import with_secrets
from podway.errors import UserError
from podway.task.environment import Overrides, supplied
from podway.task.read import read_task_text
from podway.task.task import Url

from .reading import read, refused, steady

VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


def test_non_string_values_are_kept_as_written() -> None:
    task = read("envs: {A: true, B: 1.10, C: 0x10, D: yes, E: 2024-01-01, F: 1e3, G: '', H: 007}")
    assert task.env == {
        "A": "true",
        "B": "1.10",
        "C": "0x10",
        "D": "yes",
        "E": "2024-01-01",
        "F": "1e3",
        "G": "",
        "H": "007",
    }


def test_precedence(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("A=env-file\nB=env-file\nS=env-file\nT=env-file\nNEW=1\n")
    (tmp_path / "s").write_text("S=secret-file\nT=secret-file\n")
    task = read(
        "envs: {A: file, B: file, C: file}\nsecrets: {S: file, T: file, U: file, V: file}",
        env=("A=flag", "V=env-flag"),
        env_files=(str(tmp_path / "e"),),
        secrets=("S=flag",),
        secret_files=("s",),
        cwd=str(tmp_path),
    )
    assert task.env == {"A": "flag", "B": "env-file", "C": "file", "NEW": "1"}
    assert task.secrets == {"S": "flag", "T": "secret-file", "U": "file", "V": "env-flag"}


def test_a_variable_given_as_a_secret_is_only_a_secret() -> None:
    task = read("envs: {HF_TOKEN: }", secrets=("HF_TOKEN",), local_env={"HF_TOKEN": "hf"})
    assert (task.env, task.secrets) == ({}, {"HF_TOKEN": "hf"})


def test_required_variables_name_the_flag() -> None:
    error = refused("envs:\n  HF_TOKEN:\n")
    assert error.what == "f.yaml:2:12: envs.HF_TOKEN: the variable HF_TOKEN has no value"
    assert "--env HF_TOKEN" in error.hint
    for text in ("secrets:\n  S:\n", "secrets:\n  - secrets:S\n", "secrets: [S]"):
        assert "--secret S" in refused(text).hint
    assert read("secrets: [secrets:S]", secrets=("S=1",)).secrets == {"S": "1"}


def test_local_environment_is_used_only_when_asked() -> None:
    assert refused("envs: {A: }", local_env={"A": "x"})
    assert read("envs: {A: }", env=("A",), local_env={"A": "x"}).env == {"A": "x"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"env": ("A",)}, "--env A: A is not set in your environment"),
        ({"env": ("1A=x",)}, "--env 1A: not a variable name"),
        ({"env": ("",)}, "not a variable name"),
        ({"secrets": ("A b=x",)}, "--secret A b: not a variable name"),
        ({"env": ("A=\0",)}, "NUL"),
        ({"env": ("A=\udcff",)}, "not UTF-8"),
        ({"env_files": ("/nonexistent",)}, "no such file"),
        ({"env_files": ("/",)}, "a directory"),
    ],
)
def test_wrong_flags(given: dict[str, tuple[str, ...]], says: str) -> None:
    assert says in refused("{}", **given).what


def test_wrong_declarations() -> None:
    assert "declared twice" in refused("envs: {A: x}\nsecrets: {A: y}").what
    assert "not a valid name" in refused("envs: {1A: x}").what
    assert "expected text, found a list" in refused("envs: {A: [x]}").what
    assert "NUL" in refused('envs: {A: "\\0"}').what


@steady
@given(VALUES, st.sampled_from(["$X", "${X}"]))
def test_substitution_survives_any_value(value: str, reference: str) -> None:
    """Quotes, backslashes, newlines, `$Y`: what goes in comes out, once, in a place where any text is allowed."""
    body = f"service: {{ports: 80, readiness_probe: {{path: /, headers: {{h: 'a{reference}-b'}}}}}}"
    overrides = Overrides(env=(f"X={value}", "Y=never"), cwd="/")
    task = read_task_text(body, overrides=overrides)
    assert task.service and task.service.probes[0].headers == {"h": f"a{value}-b"}


def test_unknown_variables_stay_and_secrets_are_refused() -> None:
    task = read("service: {ports: 80, readiness_probe: '/$NOPE/${X:-y}/$$'}")
    assert task.service and task.service.probes[0].path == "/$NOPE/${X:-y}/$$"
    error = refused("secrets: {S: x}\nservice: {ports: 80, readiness_probe: /$S}")
    assert "the secret S cannot be used here" in error.what
    assert "the secret S cannot be used here" in refused("secrets: {S: x}\nfile_mounts: {/x: $S/y}").what
    assert "given twice" in refused("envs: {A: /x}\nvolumes: {$A: v, /x: w}").what


def test_secrets_stay_by_name_where_they_are_filled_in_later() -> None:
    task = read(
        """
        secrets: {AUTH: 'hidden "value"'}
        envs: {HOST: example.com}
        file_mounts: {/tmp/x: "https://$HOST/x?token=$AUTH"}
        service:
          ports: 80
          readiness_probe: {path: /, headers: {Authorization: Bearer $AUTH}, post_data: {key: "${AUTH}", host: $HOST}}
        """
    )
    assert task.service is not None
    (probe,) = task.service.probes
    assert probe.headers == {"Authorization": "Bearer ${AUTH}"} and "hidden" not in str(task.service)
    assert task.file_mounts[0].source == Url(url="https://example.com/x?token=${AUTH}")
    (sent,) = with_secrets(task.service.probes, task.secrets)
    assert sent.headers == {"Authorization": 'Bearer hidden "value"'}
    assert json.loads(sent.body or "") == {"key": 'hidden "value"', "host": "example.com"}
    assert with_secrets(task.service.probes, {}) == task.service.probes


def test_env_files(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(
        "\ufeff# comment\n"
        "PLAIN=a b # trailing\r\n"
        "export EXPORTED = x\n"
        "SINGLE='a # $b \\n'\n"
        'DOUBLE="a\\n\\"q\\" # no comment" # comment\n'
        'LINES="one\ntwo"\n'
        "EMPTY=\n"
        "HASH=a#b\n"
        "FROM=${PLAIN}/${HOMEISH}/${UNKNOWN}\n"
        "TAKEN\n"
    )
    found = supplied(Overrides(env_files=(str(file),), local_env={"TAKEN": "yes", "HOMEISH": "h"})).env
    assert found == {
        "PLAIN": "a b",
        "EXPORTED": "x",
        "SINGLE": "a # $b \\n",
        "DOUBLE": 'a\n"q" # no comment',
        "LINES": "one\ntwo",
        "EMPTY": "",
        "HASH": "a#b",
        "FROM": "a b/h/${UNKNOWN}",
        "TAKEN": "yes",
    }


@pytest.mark.parametrize("line", ["1A=x", "A B=x", 'A="open', "A='open", "=x", "MISSING"])
def test_wrong_lines_in_env_files_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "e").write_text(f"OK=1\n{line}\n")
    with pytest.raises(UserError, match=r"e:2: ") as caught:
        supplied(Overrides(env_files=(str(tmp_path / "e"),)))
    assert caught.value.hint


@steady
@given(st.binary(max_size=200))
def test_no_env_file_raises_anything_else(data: bytes) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "e"
        path.write_bytes(data)
        try:
            supplied(Overrides(env_files=(str(path),)))
        except UserError as error:
            assert error.hint
