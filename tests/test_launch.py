"""What each rank is given: true values by every name people's scripts read."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec

from podway.launch import Launch, runs_image_command
from podway.order import Host, Order
from podway.task.task import FileMount, Git, Resources, Task, Url, Volume

GOLDEN = Path(__file__).parent / "golden" / "launch"


def launch(slices: int = 1, hosts_per_slice: int = 4, **more: object) -> Launch:
    hosts = tuple(
        Host(
            rank=rank,
            slice=rank // hosts_per_slice,
            worker=rank % hosts_per_slice,
            address=f"10.0.0.{rank + 1}",
            home=f"/home/h{rank}",
            id=f"x/{rank}",
        )
        for rank in range(slices * hosts_per_slice)
    )
    order = Order(
        accelerator_type="v6e-16",
        topology="4x4",
        slices=slices,
        provider="gcp",
        zone="us-east5-b",
        hosts_per_slice=hosts_per_slice,
        chips_per_host=4,
    )
    plain = Launch(
        job="abc-7",
        number=7,
        cluster="demo",
        task=Task(run="true"),
        order=order,
        hosts=hosts,
        simulated=False,
        user="ann",
        submitted=1000.0,
    )
    return msgspec.structs.replace(plain, **more)


def golden(name: str, env: dict[str, str]) -> None:
    import os

    path = GOLDEN / f"{name}.json"
    text = json.dumps(env, indent=2, sort_keys=True) + "\n"
    if os.environ.get("PODWAY_REWRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_environment_of_a_real_slice() -> None:
    here = launch()
    golden("one-slice-rank-2-run", here.env_for(here.hosts[2], "run"))
    golden("one-slice-rank-2-setup", here.env_for(here.hosts[2], "setup"))


def test_environment_of_two_slices() -> None:
    here = launch(slices=2)
    golden("two-slices-rank-5-run", here.env_for(here.hosts[5], "run"))


def test_environment_of_a_simulated_slice() -> None:
    here = launch(simulated=True, cache_dir="/cache")
    golden("simulated-rank-1-run", here.env_for(here.hosts[1], "run"))


def test_compiled_programs_are_shared_only_where_they_run_on_one_cpu_device() -> None:
    """Programs over several of them do not bear it: podway.model.compiled."""
    one = launch(simulated=True, cache_dir="/cache", order=Order(accelerator_type=None, provider="local"))
    assert one.env_for(one.hosts[0], "run")["JAX_COMPILATION_CACHE_DIR"] == "/cache"


def test_real_hosts_are_left_to_the_tpu_metadata() -> None:
    here = launch()
    env = here.env_for(here.hosts[0], "run")
    assert not [name for name in env if name.startswith("OMPI") or name in ("JAX_PLATFORMS", "XLA_FLAGS")]


def test_the_task_s_own_environment_wins_and_xla_flags_are_joined() -> None:
    here = launch(simulated=True, task=Task(run="true", env={"XLA_FLAGS": "--mine", "PODWAY_RANK": "x"}))
    env = here.env_for(here.hosts[0], "run")
    assert env["PODWAY_RANK"] == "x"
    assert env["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4 --mine"


def test_git_and_http_sources_are_fetched_by_a_script_that_is_right_twice(tmp_path: Path) -> None:
    """Run for real: a clone, a pull, a pinned ref, odd names."""
    origin, home = tmp_path / "o r'igin", tmp_path / "home"
    home.mkdir()
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run([*git, "init", "-q", str(origin)], check=True)
    (origin / "f").write_text("one")
    subprocess.run([*git, "add", "."], cwd=origin, check=True)
    subprocess.run([*git, "commit", "-qm", "one"], cwd=origin, check=True)
    first = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=origin, capture_output=True, text=True, check=True
    ).stdout.strip()
    task = Task(
        run="true",
        workdir=Git(url=str(origin)),
        file_mounts=(FileMount(target="~/pinned dir", source=Git(url=str(origin), hash=first)),),
        setup="true",
    )
    script = launch(task=task).script("setup")
    for content in ("one", "two"):
        (origin / "f").write_text(content)
        subprocess.run([*git, "commit", "-qam", content, "--allow-empty"], cwd=origin, check=True)
        subprocess.run(["bash", "-c", script], check=True, env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, cwd=home)
        assert (home / "sky_workdir" / "f").read_text() == content
        assert (home / "pinned dir" / "f").read_text() == "one"


def test_a_source_that_cannot_be_fetched_fails_the_setup(tmp_path: Path) -> None:
    task = Task(
        file_mounts=(FileMount(target="~/x", source=Url(url="http://127.0.0.1:1/none")),), setup="touch ~/went-on"
    )
    script = launch(task=task).script("setup")
    done = subprocess.run(
        ["bash", "-c", script], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True
    )
    assert done.returncode != 0
    assert not (tmp_path / "went-on").exists()


def test_a_secret_in_an_address_is_filled_in_by_the_hosts_shell(tmp_path: Path) -> None:
    (tmp_path / "a b'c").write_text("fetched")
    mount = FileMount(target="~/x", source=Url(url=f"file://{tmp_path}/${{S}}"))
    task = Task(run="true", secrets={"S": "", "T": ""}, file_mounts=(mount,))
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "S": "a%20b'c"}
    subprocess.run(["sh", "-c", launch(task=task).script("setup")], check=True, env=env)
    assert (tmp_path / "x").read_text() == "fetched"


def in_image(image: str | None, **more: object) -> Task:
    return Task(**{"run": "true", "resources": (Resources(image=image),), **more})  # type: ignore[arg-type]


def test_the_image_of_a_job_is_its_own_or_its_clusters() -> None:
    order = msgspec.structs.replace(launch().order, image="docker:cluster")
    for task, image in (
        (Task(run="true"), "cluster"),
        (in_image("docker:own"), "own"),
        (in_image("docker:cluster"), "cluster"),
    ):
        container = launch(order=order, task=task).container
        assert container is not None and container.image == image
    plain = msgspec.structs.replace(order, image="projects/p/global/images/i")
    assert launch(order=plain).container is None


def test_an_image_is_pulled_in_setup_and_shows_the_tasks_directories() -> None:
    mounts = (
        FileMount(target="/data", source=Url(url="http://x/y")),
        FileMount(target="rel", source=Url(url="http://x/y")),
    )
    task = in_image("docker:i", user="me", file_mounts=mounts)
    told = launch(task=task).container
    assert told is not None and told.user == "me"
    assert told.mounts == (("~/sky_workdir", "~/sky_workdir", False), ("/data", "/data", False))
    assert launch(task=in_image("docker:i")).script("setup") == ":"
    assert launch(task=in_image(None)).script("setup") == ""


def test_directories_of_the_host_are_bound_into_an_image() -> None:
    volumes = (
        Volume(path="/data", instance_path="/mnt/data"),
        Volume(path="/ro", instance_path="/mnt/ro", read_only=True),
    )
    task = in_image("docker:i", volumes=(*volumes, Volume(path="/disk", name="left-out", optional=True)))
    told = launch(task=task).container
    assert told is not None and told.volumes == (("/mnt/data", "/data", False), ("/mnt/ro", "/ro", True))
    assert "podway_link" not in launch(task=task).script("run")
    order = msgspec.structs.replace(launch().order, provider="local")
    simulated = launch(task=task, order=order, simulated=True).container
    assert simulated is not None and simulated.volumes[0] == ("~/.podway/disk/mnt/data", "/data", False)


def test_directories_of_the_host_are_linked_without_an_image(tmp_path: Path) -> None:
    source, seen = tmp_path / "it's a disk" / "x", tmp_path / "new" / "data"
    no_sudo = tmp_path / "bin"
    no_sudo.mkdir()
    (no_sudo / "sudo").write_text("#!/bin/sh\nexit 1\n")
    (no_sudo / "sudo").chmod(0o755)

    def said(path: Path, run: str) -> tuple[int, str]:
        task = Task(run=run, volumes=(Volume(path=str(path), instance_path=str(source)),))
        script = launch(task=task).script("run")
        env = {"PATH": f"{no_sudo}:/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout + done.stderr

    assert said(seen, f"echo kept > {seen}/file") == (0, "")
    assert (source / "file").read_text() == "kept\n"
    assert said(seen, f"cat {seen}/file") == (0, "kept\n"), "right when it is done twice"
    assert said(source, "echo same") == (0, "same\n")
    (tmp_path / "own").mkdir()
    code, text = said(tmp_path / "own", "echo not reached")
    assert (
        code == 1
        and text.startswith(f"podway: volumes: {tmp_path}/own is on this host already")
        and text.count("\n") == 1
    )
    code, text = said(tmp_path / "bin" / "sudo" / "below", "echo not reached")
    assert code == 1 and "cannot be made on this host" in text and text.count("\n") == 1


def test_a_dstack_run_starts_where_its_image_says() -> None:
    assert launch(task=in_image("docker:i")).cwd == "~/sky_workdir"
    assert launch(task=in_image("docker:i", dialect="dstack")).cwd == ""
    assert launch(task=in_image("docker:i", dialect="dstack", working_dir="/w")).cwd == "/w"
    assert launch(task=in_image("docker:i", dialect="dstack", workdir=Git(url="u"))).cwd == "~/sky_workdir"
    assert runs_image_command(in_image("docker:i", dialect="dstack", run="")) is True
    assert runs_image_command(in_image("docker:i", run="")) is False


def test_python_is_the_hosts_own_if_it_is_that_and_uvs_otherwise(tmp_path: Path) -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python3").symlink_to(sys.executable)
    (tools / "uv").write_text('#!/bin/sh\necho "$@" >> "$HOME/asked"\n[ "$5" = 3.9 ] && exit 2\nfor v; do :; done\n'
                              'mkdir -p "$v/bin"; ln -s /bin/sh "$v/bin/python"; echo "VIRTUAL_ENV=$v" > "$v/bin/activate"\n')  # fmt: skip
    (tools / "uv").chmod(0o755)

    def said(version: str, **env: str) -> tuple[int, str]:
        script = launch(task=Task(run="echo in $VIRTUAL_ENV", python=version)).script("run")
        found = {"HOME": str(tmp_path), "PATH": f"{tools}:/usr/bin:/bin", **env}
        done = subprocess.run(["sh", "-c", script], env=found, capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout

    assert said(own, VIRTUAL_ENV="/own") == (0, "in /own\n")
    assert not (tmp_path / "asked").exists()
    made = f"{tmp_path}/.podway/python-3.7"
    assert said("3.7", VIRTUAL_ENV="/own") == (0, f"in {made}\n")
    assert said("3.7") == (0, f"in {made}\n")
    assert (tmp_path / "asked").read_text() == f"venv -q --seed -p 3.7 {made}\n"  # once
    code, text = said("3.9")
    assert code == 1 and text.startswith("podway: python 3.9 is not on this host") and text.count("\n") == 1
    (tools / "uv").unlink()
    (tools / f"python{own}").symlink_to(sys.executable)
    assert said(own) == (0, f"in {tmp_path}/.podway/python-{own}\n")  # without uv, and without a network
