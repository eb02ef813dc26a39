"""Google's clients, logged in to a sandbox."""

from pathlib import Path
from typing import Any

import grpc
import requests
from google.auth.transport.requests import AuthorizedSession
from google.cloud import tpu_v2
from google.oauth2.credentials import Credentials

from podway.sandbox.running import CREDENTIALS_FILE, Running


def credentials_of(sandbox: Running) -> Credentials:
    """Those that GOOGLE_APPLICATION_CREDENTIALS would name."""
    return Credentials.from_authorized_user_file(str(Path(sandbox.state) / CREDENTIALS_FILE))  # type: ignore[no-untyped-call,no-any-return]


def session_of(sandbox: Running) -> requests.Session:
    """For plain HTTP requests."""
    return AuthorizedSession(credentials_of(sandbox))  # type: ignore[no-untyped-call]


class _Token(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), ("authorization", f"Bearer {self._token}")]
        return continuation(details._replace(metadata=metadata), request)


def over_grpc(module: Any, sandbox: Running, token: str | None = None) -> Any:
    """A TPU client of any version; with another token than the sandbox's, where one is given."""
    channel = grpc.intercept_channel(
        grpc.insecure_channel(sandbox.grpc), _Token(sandbox.token if token is None else token)
    )
    return module.TpuClient(transport=module.TpuClient.get_transport_class("grpc")(channel=channel))


def over_rest(sandbox: Running) -> tpu_v2.TpuClient:
    """The client of v2 over REST."""
    options = {"api_endpoint": sandbox.rest}
    return tpu_v2.TpuClient(transport="rest", credentials=credentials_of(sandbox), client_options=options)
