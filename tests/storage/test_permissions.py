"""Refusals of Google's storage, as they come, and what a person is told."""

import pytest

from podway.storage.address import Address, parse
from podway.storage.permissions import is_refusal, refused

BUCKET = Address("data", "train")


@pytest.mark.parametrize(
    ("said", "action", "what", "hint"),
    [
        (
            "403 GET https://storage.googleapis.com/storage/v1/b/data/o: ada@example.com does not have storage.objects.list "
            "access to the Google Cloud Storage bucket. Permission 'storage.objects.list' denied on resource.",
            "list",
            "gs://data/train: ada@example.com may not list it: the permission storage.objects.list is missing",
            "gcloud storage buckets add-iam-policy-binding gs://data --member=user:ada@example.com "
            "--role=roles/storage.objectViewer",
        ),
        (
            "403 POST .../b?project=p: tpu@p.iam.gserviceaccount.com does not have storage.buckets.create access",
            "create",
            "the permission storage.buckets.create is missing",
            "--member=serviceAccount:tpu@p.iam.gserviceaccount.com --role=roles/storage.admin",
        ),
        (
            "401 GET: Anonymous caller does not have storage.objects.get access to the Google Cloud Storage object.",
            "read",
            "gs://data/train: nobody is logged in, and the public may not read it",
            "gcloud auth application-default login",
        ),
        ("403 Forbidden", "write", "the permission storage.objects.create is missing", "roles/storage.objectCreator"),
    ],
)
def test_the_missing_permission_is_named_with_the_command_that_gives_it(
    said: str, action: str, what: str, hint: str
) -> None:
    error = refused(said, action, BUCKET)
    assert what in error.what and hint in error.hint
    assert error.status == 403


def test_a_tools_output_is_told_from_other_trouble() -> None:
    assert is_refusal(
        "ERROR : : error listing: googleapi: Error 403: x does not have storage.objects.list access, forbidden"
    )
    assert not is_refusal("podway: rclone is not on this host and cannot be installed: E: unable to locate package")


def test_an_address_comes_apart() -> None:
    assert parse("gs://b/x/y/") == Address("b", "x/y") and str(parse("gs://b/")) == "gs://b"
    assert parse("gs://b").name_of("a/f") == "a/f" and parse("gs://b/p").name_of("f") == "p/f"
