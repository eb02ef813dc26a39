"""Buckets of Amazon S3, and of what speaks its protocol, to copy from: by AWS's own client. All of it blocks: call it from a thread.

Credentials are those the task gives (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, as secrets or variables), else those that the
server finds as every AWS program does; without any, what is public can still be read. They stay in this process. `AWS_ENDPOINT_URL_S3`
of the server is the client's own way to another endpoint.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
from botocore import UNSIGNED  # type: ignore[import-untyped]
from botocore import exceptions as aws
from botocore.config import Config  # type: ignore[import-untyped]

from podway.errors import ProviderError, UserError
from podway.storage.address import Address
from podway.storage.downloads import RemoteObject

_NO_SUCH = ("NoSuchBucket", "404", "NotFound")
_REFUSED = ("AccessDenied", "403", "Forbidden", "AllAccessDisabled")
_WRONG_KEY = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_GIVE = "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY with --secret, or log in to AWS where the Podway server runs"


class S3Store:
    """See the module docstring."""

    def __init__(self, credentials: Mapping[str, str]) -> None:
        given = {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"}
        known = {key: credentials[name] for key, name in given.items() if credentials.get(name)}
        if len(known) == 2 and credentials.get("AWS_SESSION_TOKEN"):
            known["aws_session_token"] = credentials["AWS_SESSION_TOKEN"]
        region = credentials.get("AWS_REGION") or credentials.get("AWS_DEFAULT_REGION")
        try:
            session = boto3.session.Session(region_name=region, **known if len(known) > 1 else {})
            signed = {} if session.get_credentials() else {"signature_version": UNSIGNED}
            self._client: Any = session.client("s3", config=Config(retries={"mode": "standard"}, **signed))
        except (aws.BotoCoreError, ValueError) as error:
            raise UserError(f"AWS's client cannot be set up: {_line(error)}", "correct its settings") from None

    def objects(self, address: Address) -> list[RemoteObject]:
        """What lies at or below the address; its ETag is the version of an object."""
        with _plainly(address):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=address.bucket, Prefix=address.prefix)
            found = [one for page in pages for one in page.get("Contents", ())]
        return [
            RemoteObject(one["Key"], str(one["ETag"]), partial(self._fetch, address, one["Key"], one["ETag"]))
            for one in found
        ]

    def _fetch(self, address: Address, key: str, tag: str, path: Path) -> None:
        with _plainly(address):
            # If-Match: what was written meanwhile is another version, and is fetched by the next try.
            body = self._client.get_object(Bucket=address.bucket, Key=key, IfMatch=tag)["Body"]
            with body, path.open("wb") as file:
                shutil.copyfileobj(body, file, 1 << 20)


@contextlib.contextmanager
def _plainly(address: Address) -> Iterator[None]:
    """What the client raises, as a person can act on it; never with what it was asked with."""
    try:
        yield
    except aws.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _NO_SUCH:
            raise UserError(f"s3://{address.bucket} does not exist", "correct the name", status=404) from None
        if code in _REFUSED:
            raise UserError(f"{address}: access is denied: listing and reading it takes a permission", _GIVE) from None
        if code in _WRONG_KEY:
            raise UserError(f"{address}: AWS does not take these credentials ({code})", _GIVE) from None
        raise ProviderError(f"{address}: the store answered {code or 'an error'}") from None
    except aws.NoCredentialsError:
        raise UserError(f"{address}: there are no AWS credentials", _GIVE) from None
    except aws.ParamValidationError:
        raise UserError(f"s3://{address.bucket} is not the name of a bucket", "correct the name") from None
    except (aws.BotoCoreError, aws.HTTPClientError) as error:
        raise ProviderError(f"{address}: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
