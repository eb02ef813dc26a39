"""Whether Google Cloud is set up, told at once; where it is, its offers come first, and of one price the nearest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from podway.catalog.regions import distance_km, regions
from podway.errors import UserError
from podway.providers import Offer, ProviderSet, open_provider
from podway.providers.gcp.configured import check_configured, find_project, is_configured, preferred_place
from podway.providers.gcp.diagnose import diagnose
from podway.providers.gcp.offers import _rank
from podway.providers.gcp.places import check_place, remark_on_place
from podway.providers.gcp.settings import Settings
from podway.sandbox.running import running_sandbox
from podway.task.task import Accelerator, Placement, Resources


@pytest.fixture
def gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of gcloud's, as a login and `gcloud config set` leave it."""
    folder = tmp_path / "gcloud"
    (folder / "configurations").mkdir(parents=True)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(folder))
    monkeypatch.setattr("podway.providers.gcp.configured._DMI", tmp_path / "no-dmi")
    return folder


def test_nothing_is_set_up(gcloud: Path, tmp_path: Path) -> None:
    assert not is_configured(tmp_path)
    assert ProviderSet(tmp_path).usual() == ["local"]
    with pytest.raises(UserError, match="no Google Cloud project is chosen"):
        open_provider("gcp", tmp_path)
    (tmp_path / "gcp.yaml").write_text("project: my-project\n")
    assert ProviderSet(tmp_path).usual() == ["gcp", "local"]
    with pytest.raises(UserError, match="no Google Cloud credentials"):
        open_provider("gcp", tmp_path)


def test_a_login_of_gcloud_and_its_project_are_enough(gcloud: Path, tmp_path: Path) -> None:
    (gcloud / "application_default_credentials.json").write_text('{"type": "authorized_user"}')
    assert not is_configured(tmp_path)  # nobody said which project
    (gcloud / "configurations" / "config_default").write_text("[core]\nproject = lab\n[compute]\nzone = us-east5-b\n")
    assert is_configured(tmp_path) and find_project(Settings()) == "lab" and preferred_place() == "us-east5-b"
    check_configured(tmp_path)
    (gcloud / "active_config").write_text("other\n")
    (gcloud / "configurations" / "config_other").write_text("[core]\nproject = second\n[compute]\nregion = us-west4\n")
    assert find_project(Settings()) == "second" and preferred_place() == "us-west4"
    (gcloud / "configurations" / "config_other").write_bytes(b"\xff\xfe[[[not\nini")
    assert find_project(Settings()) is None and not is_configured(tmp_path)


def test_a_service_accounts_file_names_its_project(
    gcloud: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    monkeypatch.setenv("PODWAY_GCP_PROJECT", "lab")
    with pytest.raises(UserError, match="no such file"):
        check_configured(tmp_path)
    key.write_text(json.dumps({"type": "service_account", "project_id": "of-the-key"}))
    check_configured(tmp_path)
    monkeypatch.delenv("PODWAY_GCP_PROJECT")
    assert find_project(Settings()) == "of-the-key"
    key.write_text("[1, 2")
    assert find_project(Settings()) is None


def test_what_is_missing_is_told_before_googles_clients_are_imported(tmp_path: Path) -> None:
    """They take longer than a person should wait for one line."""
    (tmp_path / "gcp.yaml").write_text("projct: x\n")
    code = (
        "import sys; from pathlib import Path; from podway.errors import UserError; from podway.providers import open_provider\n"
        f"try: open_provider('gcp', Path({str(tmp_path)!r}))\n"
        "except UserError as error: print(error.what); print('google.cloud.tpu_v2' in sys.modules, 'asyncssh' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "projct: unknown key" in said[0] and said[1] == "False False"


def test_one_line_at_once_from_the_command_line(podway_home: Path, tmp_path: Path) -> None:
    """Nothing looks for a metadata server on the way, which took 11 to 17 s; the test above holds that."""
    command = [sys.executable, "-m", "podway.cli.main", "launch", "-y", "--infra", "gcp", "--tpus", "v6e-8", "true"]
    subprocess.run([*command[:3], "status"], check=True, capture_output=True)  # the server is there
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "Error: no Google Cloud project is chosen", done.stderr
    assert len(done.stderr.strip().splitlines()) == 2


def test_with_google_cloud_set_up_its_offers_come_first_and_a_simulation_is_asked_for_by_name(
    podway_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*more: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "podway.cli.main", "launch", "--dryrun", "--gpus", "tpu-v6e-8", *more, "true"]
        return subprocess.run(words, capture_output=True, text=True)

    with running_sandbox(tmp_path / "sandbox", hosts="none") as sandbox:
        for name, value in sandbox.environment(Path("/nonexistent")).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("PODWAY_GCP_ZONES", raising=False)
        monkeypatch.setenv("CLOUDSDK_COMPUTE_ZONE", "us-east5-b")
        done = launch()
        assert done.returncode == 0, done.stderr
        rows = [line for line in done.stderr.splitlines() if line.lstrip().startswith(("gcp (", "local ("))]
        assert len(rows) > 2, done.stderr
        assert "gcp (us-east5-b)" in rows[0] and "✔" in rows[0]  # of one price, where gcloud is set to
        assert "local (here)" in rows[-1] and "0.00" in rows[-1] and "--infra local" in rows[-1] and "✔" not in rows[-1]
        assert json.loads(done.stdout)["provider"] == "gcp"
        assert json.loads(launch("--infra", "local").stdout)["provider"] == "local"
        nowhere = launch("--infra", "gcp", "--zone", "mars-a")
        assert nowhere.returncode == 1 and "mars-a is not a zone of Google Cloud" in nowhere.stderr
        sandbox.command("POST", "projects", {"name": "theirs-1", "access": False})
        wanted = Resources(accelerator=Accelerator(type="v6e-8"))
        for project, said, hint in (
            ("sandbx", "project sandbx does not exist, or this account may not use it", "did you mean `sandbox`?"),
            ("theirs-1", "permission tpu.nodes.list is missing", "roles/tpu.admin"),
        ):
            monkeypatch.setenv("PODWAY_GCP_PROJECT", project)
            wrong = next(one for one in diagnose(podway_home) if not one.ok)
            assert said in wrong.note and hint in wrong.fix
            with pytest.raises(UserError, match=said) as refused:  # one line, and not one for each zone
                open_provider("gcp", podway_home).offers(wanted, 1)
            assert hint in refused.value.hint


def test_of_one_price_the_named_zone_then_the_nearest_region() -> None:
    zones = ["us-central1-a", "europe-west4-a", "us-east1-d", "us-east5-b", "asia-east1-c"]

    def order(named: tuple[str, ...], near: str | None, **prices: float | None) -> list[str | None]:
        offers = [
            Offer(
                provider="gcp", accelerator_type="v6e-8", zone=zone, hourly_cost=prices.get(zone.replace("-", "_"), 1.0)
            )
            for zone in zones
        ]
        return [offer.zone for offer in sorted(offers, key=lambda offer: _rank(offer, named, near))]

    assert order((), "us-east5-b")[:3] == ["us-east5-b", "us-east1-d", "us-central1-a"]
    assert order((), "us-east5")[0] == "us-east5-b"
    assert order((), "europe-west1-b")[0] == "europe-west4-a"
    assert order(("us-east1-d", "asia-east1-c"), None)[:2] == ["us-east1-d", "asia-east1-c"]
    assert order((), "us-east5-b", asia_east1_c=0.5)[0] == "asia-east1-c"  # the price goes first
    assert order((), "us-east5-b", us_east5_b=None)[-1] == "us-east5-b"
    assert order((), None) == sorted(zones)


def test_distances_are_those_of_a_map() -> None:
    assert distance_km("us-east5", "us-east5") == 0
    assert 450 < distance_km("us-east4", "us-east5") < 500  # Ashburn to Columbus
    assert 8900 < distance_km("asia-northeast1", "europe-west2") < 9700  # Tokyo to London
    assert all(distance_km(a, b) == pytest.approx(distance_km(b, a)) for a in regions() for b in regions())
    assert distance_km("us-east5", "mars-north1") == float("inf")


def test_a_place_that_is_nowhere_is_refused_before_anybody_is_asked() -> None:
    with pytest.raises(UserError, match="Google Cloud has no zone mars-east1-a"):
        check_place(Placement(zone="mars-east1-a"), ())
    with pytest.raises(UserError, match="Google Cloud has no region us-east55") as said:
        check_place(Placement(region="us-east55"), ())
    assert "us-east5" in said.value.hint
    check_place(Placement(zone="mars-east1-a", region="mars-east1"), ("mars-east1-a",))  # the settings name it
    check_place(Placement(zone="us-east5-z"), ())  # the cloud will tell
    check_place(Placement(), ())
    with pytest.raises(UserError) as misspelt:
        check_place(Placement(zone="us-eats5-b"), ())
    assert misspelt.value.hint == "did you mean `us-east5-b`?"


def test_a_zone_that_the_catalog_does_not_know_is_doubted(tmp_path: Path) -> None:
    assert "did you mean us-east5-" in remark_on_place(tmp_path, Placement(provider="gcp", zone="us-east5-z"))
    (tmp_path / "gcp.yaml").write_text("zones: [us-east5-z]\n")
    assert remark_on_place(tmp_path, Placement(provider="gcp", zone="us-east5-z")) == ""
    assert remark_on_place(tmp_path, Placement(provider="gcp")) == ""
