"""SkyPilot files: each field with its real semantics, and what is refused or noted by name."""

import subprocess
from pathlib import Path

import pytest

from podway.task.task import (
    Autostop,
    Bucket,
    FileMount,
    Git,
    LocalDir,
    Placement,
    Probe,
    Recovery,
    Registry,
    Scaling,
    Url,
    Volume,
)

from .reading import flags, only, read, refused, types


def resources(text: str) -> str:
    return "resources:\n" + "\n".join("  " + line for line in text.splitlines())


def test_an_empty_mapping_is_a_task_with_defaults() -> None:
    task = read("{}")
    assert (task.kind, task.dialect, task.slices, task.run, task.shell) == ("task", "skypilot", 1, "", "bash")
    assert task.resources[0].accelerator is None


@pytest.mark.parametrize(
    ("accelerators", "expected", "ordered"),
    [
        ("tpu-v6e-8", ["v6e-8"], False),
        ("TPU-V6E-8", ["v6e-8"], False),
        ("v6e-8", ["v6e-8"], False),
        ("tpu-v6e-8:1", ["v6e-8"], False),
        ("tpu-v5e-8", ["v5litepod-8"], False),
        ("{tpu-v6e-8: 1}", ["v6e-8"], False),
        ("{tpu-v6e-8, tpu-v5litepod-8}", ["v6e-8", "v5litepod-8"], False),
        ("{'tpu-v6e-8:1', 'tpu-v5litepod-8:1'}", ["v6e-8", "v5litepod-8"], False),
        ("[tpu-v6e-8, tpu-v5litepod-8:1]", ["v6e-8", "v5litepod-8"], True),
        ("[tpu-v6e-8, A100:8]", ["v6e-8"], False),
    ],
)
def test_accelerators_in_every_form(accelerators: str, expected: list[str], ordered: bool) -> None:
    task = read(resources(f"accelerators: {accelerators}"))
    assert (types(task), task.ordered) == (expected, ordered)


@pytest.mark.parametrize(
    ("accelerators", "says", "hint"),
    [
        ("tpu-v6e-8:2", "asks for 2 slices", "num_nodes"),
        ("{tpu-v6e-8: 2}", "asks for 2 slices", "num_nodes"),
        ("{tpu-v6e-8: 0.5}", "0.5 of a TPU", "write 1"),
        ("tpu-v6e-7", "no v6e-7", "v6e-8"),
        ("A100:8", "not a TPU", "podway tpus"),
        ("[A100:8, H100]", "not a TPU", "podway tpus"),
        ("[]", "no accelerator", "tpu-v6e-8"),
        ("tpu", "does not name", "Generations"),
    ],
)
def test_impossible_accelerators(accelerators: str, says: str, hint: str) -> None:
    error = refused(resources(f"accelerators: {accelerators}"))
    assert says in error.what and hint in error.hint
    assert error.what.startswith("f.yaml:2:")


def test_a_gpu_beside_a_tpu_is_noted() -> None:
    task = read(resources("accelerators: [tpu-v6e-8, A100:8]"))
    assert task.notes == ("resources.accelerators[1]: 'A100:8' is not a TPU, and Podway runs TPUs only",)


def test_accelerator_args() -> None:
    found = only(
        read(
            """
            resources:
              accelerators: tpu-v2-8
              accelerator_args: {runtime_version: 2.12, tpu_vm: no, tpu_name: mine, gcp_queued_resource: true,
                                 topology: 2x2, reservation: r}
            """
        )
    )
    assert (found.runtime_version, found.tpu_vm, found.tpu_name) == ("2.12", False, "mine")
    assert (found.queued, found.topology, found.reservation) == (True, "2x2", "r")


def test_tpu_nodes_exist_on_v2_and_v3_with_one_node() -> None:
    node = "accelerators: tpu-{}\naccelerator_args:\n  tpu_vm: false"
    assert "not offered as a TPU Node" in refused(resources(node.format("v6e-8"))).what
    error = refused("num_nodes: 2\n" + resources(node.format("v3-8")))
    assert "TPU Node has one host" in error.what and error.what.startswith("f.yaml:1:12: num_nodes")


def test_topology_must_fit() -> None:
    assert only(read(resources("accelerators: tpu-v4-4x4x8"))).topology == "4x4x8"
    error = refused(resources("accelerators: tpu-v6e-16\naccelerator_args: {topology: 2x4}"))
    assert "16 chips" in error.what
    both = "accelerators: tpu-v6e-16\nuse_spot: true\naccelerator_args: {reservation: r}"
    assert "use_spot and a reservation are different kinds of capacity" in refused(resources(both)).what


def test_best_effort() -> None:
    best = "accelerators: tpu-v6e-16\naccelerator_args: {{best_effort: true{}}}"
    assert only(read(resources(best.format("")))).best_effort
    assert "a reservation and best_effort" in refused(resources(best.format(", reservation: r"))).what
    assert "queued resource only" in refused(resources(best.format(", gcp_queued_resource: false"))).what
    assert "use_spot and best_effort" in refused(resources("use_spot: true\n" + best.format(""))).what


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("infra: gcp", Placement(provider="gcp")),
        ("infra: GCP/us-east5", Placement(provider="gcp", region="us-east5")),
        ("infra: gcp/us-east5/us-east5-b", Placement(provider="gcp", region="us-east5", zone="us-east5-b")),
        ("infra: gcp/*/us-east5-b", Placement(provider="gcp", region="us-east5", zone="us-east5-b")),
        ("infra: '*'", Placement()),
        ("infra: '*/us-east5'", Placement(region="us-east5")),
        ("infra: k8s/my-context", Placement(provider="gke", region="my-context")),
        ("infra: ssh/pool", Placement(provider="ssh", region="pool")),
        ("infra: local", Placement(provider="local")),
        ("cloud: gcp\nzone: us-east5-b", Placement(provider="gcp", region="us-east5", zone="us-east5-b")),
        ("region: us-east5", Placement(region="us-east5")),
    ],
)
def test_places(text: str, expected: Placement) -> None:
    assert read(resources(text)).resources[0].placement == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("infra: aws/us-east-1", "aws"),
        ("cloud: azure", "azure"),
        ("cloud: gpc", "`gpc` is not a cloud"),
        ("infra: gcp/a/b/c", "cloud/region/zone"),
        ("infra: gcp\nregion: us-east5", "infra is given too"),
        ("region: us-east1\nzone: us-east5-b", "not in the region"),
    ],
)
def test_wrong_places(text: str, says: str) -> None:
    assert says in refused(resources(text)).what


def test_any_of_and_ordered_inherit_what_stands_beside_them() -> None:
    task = read(
        """
        resources:
          accelerators: tpu-v6e-8
          infra: gcp
          use_spot: true
          labels: {a: b}
          ordered:
            - region: us-east5
            - accelerators: [tpu-v5p-8, tpu-v4-8]
              use_spot: false
            - infra: aws
        """
    )
    assert types(task) == ["v6e-8", "v5p-8", "v4-8"]
    assert task.ordered
    assert [one.spot for one in task.resources] == ["yes", "no", "no"]
    assert [one.placement.region for one in task.resources] == ["us-east5", None, None]
    assert all(one.placement.provider == "gcp" and one.labels == {"a": "b"} for one in task.resources)
    assert task.notes == ("resources.ordered[2].infra: aws has no TPUs Podway can reach",)


def test_any_of_errors() -> None:
    assert "given together" in refused(resources("any_of: [{}]\nordered: [{}]")).what
    assert "empty" in refused(resources("any_of: []")).what
    assert "unknown key" in refused(resources("any_of: [{any_of: []}]")).what


def test_skypilots_three_variables_are_the_registry_of_the_image() -> None:
    text = (
        resources("image_id: docker:team/app:1")
        + "\nenvs:\n  SKYPILOT_DOCKER_USERNAME: me\n  SKYPILOT_DOCKER_SERVER: https://r.example.com/"
    )
    task = read(text + "\nsecrets: {SKYPILOT_DOCKER_PASSWORD: pw}")
    assert task.resources[0].image == "docker:r.example.com/team/app:1"
    assert task.registry == Registry(username="me", password_secret="SKYPILOT_DOCKER_PASSWORD", server="r.example.com")
    assert task.env == {} and task.secrets["SKYPILOT_DOCKER_PASSWORD"] == "pw"
    assert read(text + "\n  SKYPILOT_DOCKER_PASSWORD: pw").secrets == {"SKYPILOT_DOCKER_PASSWORD": "pw"}
    assert "SKYPILOT_DOCKER_PASSWORD is not" in refused(text).what
    plain = read(text.replace("docker:team/app:1", "projects/p/global/images/i"))
    assert plain.registry is None and plain.env["SKYPILOT_DOCKER_USERNAME"] == "me"


def test_image_flags() -> None:
    text = resources("image_id: docker:a")
    assert read(text, image="b:2").resources[0].image == "docker:b:2"
    assert "is not the name of an image" in refused(text, image="b c").what
    ignored = read(text, ignore_image=True)
    assert ignored.resources[0].image is None and "image a: ignored" in ignored.notes[-1]
    assert "is not the name of an image" in refused(resources("image_id: 'docker:x;id'")).what


def test_an_image_for_each_region_makes_an_alternative_of_each() -> None:
    images = "accelerators: tpu-v6e-8\nimage_id:\n  us-east5: docker:a\n  us-east1: docker:b"
    task = read(resources(images))
    assert [(one.placement.region, one.image) for one in task.resources] == [
        ("us-east5", "docker:a"),
        ("us-east1", "docker:b"),
    ]
    (one,) = read(resources(images + "\ninfra: gcp/us-east1")).resources
    assert one.image == "docker:b"
    assert "us-west1" in refused(resources(images + "\nregion: us-west1")).what


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", Autostop(idle_minutes=5)),
        ("false", None),
        ("10", Autostop(idle_minutes=10)),
        ("10h", Autostop(idle_minutes=600)),
        ("'2d'", Autostop(idle_minutes=2880)),
        ("{idle_minutes: 0, down: true, wait_for: NONE}", Autostop(idle_minutes=0, down=True, wait_for="none")),
        ("{down: true}", Autostop(idle_minutes=5, down=True)),
    ],
)
def test_autostop(text: str, expected: Autostop | None) -> None:
    assert read(resources(f"autostop: {text}")).autostop == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EAGER_NEXT_REGION", Recovery()),
        ("failover", Recovery(strategy="failover")),
        ("none", None),
        (
            "{max_restarts_on_errors: 3}",
            Recovery(events=("no-capacity", "interruption", "error"), max_restarts_on_errors=3),
        ),
        ("{strategy: FAILOVER, recover_on_exit_codes: 33}", Recovery(strategy="failover", exit_codes=(33,))),
        ("{recover_on_exit_codes: [1, 2]}", Recovery(exit_codes=(1, 2))),
    ],
)
def test_job_recovery(text: str, expected: Recovery | None) -> None:
    assert read(resources(f"job_recovery: {text}")).recovery == expected
    assert read(resources(f"spot_recovery: {text}")).recovery == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("autostop: soon", "minutes, or a time"),
        ("autostop: 99999999999999999999w", "ten years"),
        ("autostop: {hook: x}", "no lifecycle hooks"),
        ("job_recovery: sometimes", "EAGER_NEXT_REGION"),
        ("job_recovery: {recover_on_exit_codes: 300}", "too large"),
        ("disk_size: big", "a size in GB"),
        ("disk_size: 5\nephemeral_storage: 5", "disk_size is given too"),
        ("ports: 70000", "not a port"),
        ("ports: 9000-8000", "not a port"),
        ("ports: [http]", "expected a port"),
        ("max_hourly_cost: 0", "too small"),
        ("max_hourly_cost: .nan", "not a finite number"),
        ("priority: 5000", "too large"),
        ("use_spot: maybe", "true or false"),
        ("cpus: many", "a number or `N+`"),
        ("memory: 0", "a number or `N+`"),
        ("labels: [a]", "expected a mapping, found a list"),
        ("accelerators: tpu-v6e-8\ninstance_type: n1-standard-8", "not the host of a TPU VM"),
        ("disk_tier: fast", "not a known value"),
        ("hooks: []", "no lifecycle hooks"),
    ],
)
def test_wrong_values_in_resources(text: str, says: str) -> None:
    error = refused(resources(text))
    assert says in error.what + error.hint
    assert error.what.startswith("f.yaml:")


def test_sizes_and_ports() -> None:
    (one,) = read(resources("disk_size: 1Ti\nports: [8080, 9000-9010, '8080']\ncpus: 4\nmemory: 512MB+")).resources
    assert (one.disk_gb, one.ports, one.cpus, one.memory) == (1024, ("8080", "9000-9010"), "4", "0.5+")
    task = read(resources("accelerators: tpu-v6e-8\ncpus: 4+"))
    assert task.notes == ("resources.cpus: the hosts of a TPU slice come in one size",)


def test_unknown_keys_name_the_nearest() -> None:
    error = refused("resources:\n  acelerators: tpu-v6e-8\n")
    assert error.what == "f.yaml:2:3: resources.acelerators: unknown key"
    assert error.hint == "did you mean `accelerators`?"
    assert refused("setpu: x").hint == "did you mean `setup`?"
    assert "one of: " in refused("qqqq: x").hint


def test_names() -> None:
    assert read("name: my.task_1-x").name == "my.task_1-x"
    assert read("name: 7").name == "7"
    for bad in ("-a", "a---b", "a b", "é", "x" * 200, "'{{a}}'"):
        assert "not a task name" in refused(f"name: {bad}").what
    assert read("name: a", name="b").name == "b"
    assert refused("{}", name="-").what.startswith("--name: ")


def test_workdir(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "file").touch()
    here = flags(cwd=str(tmp_path), local_env={"HOME": str(tmp_path)})
    given = {"cwd": here.cwd, "local_env": here.local_env}
    assert read("workdir: .", **given).workdir == LocalDir(path=str(tmp_path))
    assert read("workdir: ~/code", **given).workdir == LocalDir(path=str(tmp_path / "code"))
    assert read("envs: {D: code}\nworkdir: $D", **given).workdir == LocalDir(path=str(tmp_path / "code"))
    assert read("workdir: nowhere", workdir="code", cwd=str(tmp_path)).workdir == LocalDir(path=str(tmp_path / "code"))
    assert "no such directory" in refused("workdir: file", **given).what
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert read("workdir: {url: https://x/y.git, ref: main}").workdir == Git(url="https://x/y.git", ref="main")
    assert read(f"workdir: {{url: u, ref: '{commit}'}}").workdir == Git(url="u", hash=commit)
    assert "`url` is required" in refused("workdir: {ref: main}").what


def test_num_nodes() -> None:
    assert read("num_nodes: 3").slices == 3
    assert read("num_nodes: 3", num_nodes=2).slices == 2
    for bad in ("0", "-1", "1.5", "two", "99999999999999999999999", "[1]"):
        assert refused(f"num_nodes: {bad}").what.startswith("f.yaml:1:12: num_nodes")
    assert refused("{}", num_nodes=0).what.startswith("--num-nodes: ")


def test_file_mounts(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").mkdir()
    task = read(
        """
        envs: {N: bucket-name, P: 13b}
        file_mounts:
          /a: a
          /b/${P}: ./b/
          ~/c: gs://some-bucket/x/
          /d: https://example.com/f
          rel: {name: $N}
          /e: {name: up-bucket, source: [a, b], mode: copy, persistent: no}
          /f: {source: gs://some-bucket, config: {mount: {read_only: true}}}
          /g: {name: vol, store: volume, config: {disk_size: 10, attach_mode: read_only}}
        """,
        cwd=str(tmp_path),
    )
    assert task.file_mounts == (
        FileMount(target="/a", source=LocalDir(path=str(tmp_path / "a"))),
        FileMount(target="/b/13b", source=LocalDir(path=str(tmp_path / "b"))),
        FileMount(target="~/c", source=Bucket(uri="gs://some-bucket/x", mode="COPY")),
        FileMount(target="/d", source=Url(url="https://example.com/f")),
        FileMount(target="rel", source=Bucket(uri="gs://bucket-name", create=True)),
        FileMount(
            target="/e",
            source=Bucket(
                uri="gs://up-bucket",
                mode="COPY",
                create=True,
                persistent=False,
                upload=(str(tmp_path / "a"), str(tmp_path / "b")),
            ),
        ),
        FileMount(target="/f", source=Bucket(uri="gs://some-bucket", read_only=True)),
    )
    assert task.volumes == (Volume(path="/g", name="vol", size_gb=10, read_only=True),)


def test_stores_to_copy_from() -> None:
    task = read("""
        file_mounts:
          /a: s3://bucket/below
          /b: {name: bucket, store: s3, mode: COPY}
          /c: hf://org/model@main/part
          /d: {source: hf://datasets/org/data, mode: COPY}
        """)
    uris = ["s3://bucket/below", "s3://bucket", "hf://org/model@main/part", "hf://datasets/org/data"]
    assert [mount.source for mount in task.file_mounts] == [Bucket(uri=uri, mode="COPY") for uri in uris]


@pytest.mark.parametrize(
    ("mount", "says"),
    [
        ("/x: r2://bucket", "r2://"),
        ("/x: {source: s3://bucket}", "s3://bucket can be copied, not mounted"),
        ("/x: {name: n0-bucket, store: s3}", "can be copied, not mounted"),
        ("/x: {name: n0-bucket, store: s3, mode: COPY, source: .}", "local files cannot be put into s3://n0-bucket"),
        ("/x: {name: n0-bucket, store: r2}", "a r2 store"),
        ("/x: hf://model", "not a repository of the hub"),
        ("/x: hf://buckets/org/name", "a bucket of the hub"),
        ("/x: {source: 'hf://org/model', mode: MOUNT_CACHED}", "can be copied, not mounted"),
        ("/x: {name: n0-bucket, store: dropbox}", "not a known value"),
        ("/x: {name: n0-bucket, source: gs://other}", "named by source"),
        ("/x: {mode: MOUNT}", "neither a bucket name"),
        ("/x: {name: Bad_Bucket!}", "not the name of a bucket"),
        ("/x: gs://", "not the name of a bucket"),
        ("/x: ./missing", "no such file or directory"),
        ("/x: {name: n0-bucket, source: [gs://a-bucket]}", "local files only"),
        ("/x: {name: n0-bucket, mode: MOVE}", "not a known value"),
        ("/x: {naem: n}", "unknown key"),
        ("/: a", "cannot be mounted over"),
        ("/x: {store: volume}", "needs a name"),
    ],
)
def test_wrong_file_mounts(mount: str, says: str) -> None:
    error = refused(f"file_mounts:\n  {mount}\n")
    assert says in error.what
    assert error.what.startswith("f.yaml:2:")


def test_volumes() -> None:
    task = read(
        "envs: {V: mine}\nvolumes: {/a: $V, /b: {size: 10Gi}}\nresources: {volumes: [{path: /c, storage_type: instance}]}"
    )
    assert task.volumes == (
        Volume(path="/a", name="mine"),
        Volume(path="/b", size_gb=10),
        Volume(path="/c", instance_path="/c"),
    )
    assert "neither a name nor a size" in refused("volumes: {/a: {}}").what
    assert "`path` is required" in refused("resources: {volumes: [{name: d}]}").what


def test_service_defaults_and_forms() -> None:
    service = read("service: {ports: 8080, replicas: 2, readiness_probe: /health}").service
    assert service and service.port == 8080
    assert service.probes == (Probe(path="/health"),)
    assert service.scaling == Scaling(min_replicas=2, max_replicas=2)
    task = read(
        "envs: {N: 2, B: 'q\"\\'}\nservice: {ports: 80, replicas: '${N}', readiness_probe: {path: /, post_data: {a: $B}}}"
    )
    assert task.service and task.service.scaling.min_replicas == 2
    assert task.service.probes[0].body == '{"a":"q\\"\\\\"}'
    assert read("service: {}\nresources: {ports: 9000}").service.port == 9000  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("service", "says"),
    [
        ("{}", "one port"),
        ("{ports: 80, replicas: 1, replica_policy: {min_replicas: 1}}", "replica_policy is given too"),
        ("{ports: 80, replica_policy: {max_replicas: 1}}", "`min_replicas` is required"),
        ("{ports: 80, replica_policy: {min_replicas: 2, max_replicas: 1}}", "below min_replicas"),
        ("{ports: 80, replica_policy: {min_replicas: 1, max_replicas: 2}}", "nothing says when"),
        ("{ports: 80, replica_policy: {min_replicas: 1, target_qps_per_replica: 2}}", "max_replicas is missing"),
        ("{ports: 80, readiness_probe: health}", "not a path"),
        ("{ports: 80, readiness_probe: {path: /, post_data: '{'}}", "not JSON"),
        ("{ports: 80, tls: {keyfile: a, certfile: b}}", "no such file"),
        ("{ports: 80, tls: {keyfile: a}}", "`certfile` is required"),
        ("{ports: 80, load_balancing_policy: random}", "not a known value"),
        ("{ports: 0}", "too small"),
    ],
)
def test_wrong_services(service: str, says: str) -> None:
    assert says in refused(f"service: {service}").what


def test_qps_by_accelerator_takes_tpu_names() -> None:
    policy = "{min_replicas: 1, max_replicas: 3, target_qps_per_replica: {%s}}"
    task = read(f"service: {{ports: 80, replica_policy: {policy % 'tpu-v5e-8: 2, H100: 9'}}}")
    assert task.service and task.service.scaling.target_qps_by_type == {"v5litepod-8": 2}
    assert "H100 is not a TPU" in task.notes[0]
    assert "no target for a TPU" in refused(f"service: {{ports: 80, replica_policy: {policy % 'H100: 9'}}}").what


def test_what_has_no_effect_is_noted_and_what_must_not_be_ignored_is_refused() -> None:
    task = read("event_callback: x\ninputs: {a: 1}\nconfig: {docker: {}}\n_metadata: {}\nresources: {disk_tier: best}")
    assert [note.partition(":")[0] for note in task.notes] == [
        "event_callback",
        "inputs",
        "_metadata",
        "resources.disk_tier",
        "config.docker",
    ]
    assert "pool" in refused("pool: {workers: 2}").what
    assert "managed secrets" in refused("managed_secrets: [a]").what
    assert "hooks" in refused("config: {hooks: [{run: x}]}").what


def test_config_gcp_gives_network_and_labels() -> None:
    (one,) = read("config: {gcp: {vpc_name: net, labels: {a: 1}}}\nresources: {labels: {a: own, b: c}}").resources
    assert (one.network, one.labels) == ("net", {"a": "own", "b": "c"})


def test_tpus_flag_replaces_the_files_accelerator() -> None:
    gpu_file = "resources: {accelerators: A100:8, infra: gcp}"
    assert only(read(gpu_file, tpus="v6e-8")).type == "v6e-8"
    assert types(read(gpu_file, tpus="v6e-8,v5e-8")) == ["v6e-8", "v5litepod-8"]
    assert read(gpu_file, tpus="none").resources[0].accelerator is None
    assert refused(gpu_file, tpus="v6e-9").what.startswith("--tpus: ")
    versioned = "resources: {accelerators: tpu-v6e-8, accelerator_args: {runtime_version: v2-alpha-tpuv6e}}"
    assert only(read(versioned, tpus="v6e-16")).runtime_version == "v2-alpha-tpuv6e"
    other = read(versioned, tpus="v5p-8")
    assert only(other).runtime_version is None
    assert "runtime_version: not used" in other.notes[0]
    several = read("resources: {any_of: [{accelerators: tpu-v4-8}, {accelerators: tpu-v3-8}]}", tpus="v6e-8")
    assert types(several) == ["v6e-8"]


def test_other_flags() -> None:
    assert read("resources: {use_spot: true}", use_spot=False).resources[0].spot == "no"
    assert read("resources: {infra: aws}", infra="gcp/us-east5").resources[0].placement.region == "us-east5"
    assert refused("{}", infra="aws").what.startswith("--infra: aws")
    assert read("run: a", run="b").run == "b"
    assert "takes no arguments" in refused("run: a", run_args=("x",)).what


def test_setup_and_run_are_passed_on_untouched() -> None:
    task = read("envs: {A: b}\nsetup: echo ${A}\nrun: |\n  echo $A\n  echo '${A}'\n")
    assert task.setup == "echo ${A}"
    assert task.run == "echo $A\necho '${A}'\n"
    assert subprocess.run(["bash", "-n", "-c", task.run], check=False).returncode == 0
    assert "NUL" in refused('run: "a\\0b"').what


def test_a_named_header_document_names_the_task() -> None:
    assert read("name: pipeline\n---\nrun: x\n").name == "pipeline"
    assert read("name: pipeline\n---\nname: own\nrun: x\n").name == "own"


def test_hosts_of_tpu_nodes_and_names() -> None:
    node = "accelerators: tpu-v2-8\naccelerator_args: {tpu_vm: false}\ninstance_type: "
    assert read(resources(node + "n1-highmem-8")).resources[0].instance_type == "n1-highmem-8"
    assert "cannot host a TPU Node" in refused(resources(node + "e2-standard-4")).what
    assert read(resources("accelerators: tpu-v2-8\ninstance_type: TPU-VM")).resources[0].instance_type == "TPU-VM"
    named = read(resources("accelerators: tpu-v6e-8\naccelerator_args: {tpu_name: mine}"))
    assert only(named).tpu_name is None
    assert named.notes == (
        "resources.accelerator_args.tpu_name: it names a TPU Node; a TPU VM is named after its cluster",
    )


def test_empty_and_incomplete_choices() -> None:
    assert "no image is named" in refused(resources("image_id: {}")).what
    assert "a network disk needs a name" in refused(resources("volumes: [{path: /a}]")).what
    policy = "service: {ports: 80, replica_policy: {min_replicas: 1, max_replicas: 2, target_qps_per_replica: {tpu-v6e-9: 1}}}"
    assert "no v6e-9" in refused(policy).what


def test_gpus_is_another_name_of_accelerators() -> None:
    assert types(read(resources("gpus: tpu-v6e-8"))) == ["v6e-8"]
    both = refused(resources("gpus: tpu-v6e-8\naccelerators: tpu-v6e-8"))
    assert "gpus" in both.what and "accelerators is given too" in both.what


@pytest.mark.parametrize(
    "kind", ["g5.xlarge", "p4d.24xlarge", "a2-highgpu-1g", "g2-standard-4", "Standard_NC6", "gpu_1x_a10"]
)
def test_a_machine_with_gpus_is_not_a_cpu_host(kind: str) -> None:
    error = refused(resources(f"instance_type: {kind}"))
    assert kind in error.what and "--tpus v6e-8" in error.hint
    task = read(resources(f"instance_type: {kind}"), tpus="v6e-8")
    assert task.resources[0].instance_type is None
    assert any(kind in note and "--tpus" in note for note in task.notes)


@pytest.mark.parametrize("kind", ["n1-standard-8", "e2-micro", "n2d-highmem-16", "c3-standard-22", "custom-4-8192"])
def test_cpu_machines_are_taken(kind: str) -> None:
    assert read(resources(f"instance_type: {kind}")).resources[0].instance_type == kind


@pytest.mark.parametrize("target", ["../../x", "~/../x", "a/../../../x", "~/a/../../../etc/passwd", ".."])
def test_mounts_stay_where_they_belong(target: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    assert "leads out of" in refused(f"file_mounts: {{'{target}': {tmp_path / 'f'}}}\nrun: x").what
    assert "leads out of" in refused(f"type: task\ncommands: [x]\nfiles: ['{tmp_path / 'f'}:{target}']").what


@pytest.mark.parametrize(
    ("target", "settles"), [("~/a/../b", "~/b"), ("../x", "~/x"), ("/a//b/./c/..", "/a/b"), ("./x/", "x")]
)
def test_mounts_are_told_without_detours(target: str, settles: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    assert read(f"file_mounts: {{'{target}': {tmp_path / 'f'}}}\nrun: x").file_mounts[0].target == settles


def test_a_label_of_gke_names_a_host() -> None:
    task = read("resources: {accelerators: tpu-v5-lite-device:4, infra: k8s}\nrun: x")
    assert only(task).type == "v5litepod-4"
    assert task.notes == (
        "resources.accelerators: read as v5litepod-4, whose nodes GKE labels tpu-v5-lite-podslice; "
        "nodes labelled tpu-v5-lite-device are not used",
    )
    sliced = read("resources: {accelerators: tpu-v5-lite-podslice:4, accelerator_args: {topology: 4x4}}\nrun: x")
    assert (only(sliced).type, only(sliced).topology, sliced.notes) == ("v5litepod-16", "4x4", ())


def test_a_gpu_file_is_told_so_first() -> None:
    error = refused("resources: {accelerators: A100:8}\nrun: x")
    assert "resources.accelerators: this is a GPU file: 'A100:8' is not a TPU" in error.what
    assert error.hint.startswith("--tpus v6e-8 runs it on a TPU")


def test_the_flag_takes_precedence_over_the_priority_of_the_file() -> None:
    assert read("resources: {priority: 7}\nrun: x").priority == 7
    assert read("resources: {priority: 7}\nrun: x", priority=0).priority == 0
    assert read("type: task\ncommands: [x]\npriority: 7", priority=-3).priority == -3
