"""gRPC to an emulator on this machine, such as `podway sandbox`: without TLS, and with credentials all the same."""

from typing import Any

import grpc
from google.auth.credentials import Credentials
from google.auth.transport.requests import Request


class _Login(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg, misc, unused-ignore]
    """Shows credentials on a channel without TLS, where gRPC itself refuses to."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def intercept_unary_unary(self, continuation: Any, details: Any, request: object) -> Any:
        """gRPC's."""
        headers: dict[str, str] = {}
        self._credentials.before_request(Request(), "POST", "", headers)  # type: ignore[no-untyped-call]
        metadata = [*(details.metadata or ()), *((key.lower(), value) for key, value in headers.items())]
        return continuation(details._replace(metadata=metadata), request)


def open_channel(address: str, credentials: Credentials) -> grpc.Channel:
    """A channel on which each call shows the credentials."""
    return grpc.intercept_channel(grpc.insecure_channel(address), _Login(credentials))
