"""The Cloud TPU API over gRPC: all three versions, with operations and locations, by the official protos."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.cloud.location import locations_pb2  # type: ignore[import-untyped]
from google.longrunning import operations_pb2  # type: ignore[import-untyped]
from google.protobuf import empty_pb2, json_format
from google.protobuf.message import Message

from podway.sandbox.access import Access, check_origin
from podway.sandbox.jsons import JsonObject
from podway.sandbox.status import ApiError
from podway.sandbox.tpu.schema import PROTOS, message_type, request_type

Handle = Callable[[str, str, JsonObject], Awaitable[JsonObject]]

_SHARED = {
    "google.longrunning.Operations": {
        "GetOperation": (operations_pb2.GetOperationRequest, operations_pb2.Operation),
        "ListOperations": (operations_pb2.ListOperationsRequest, operations_pb2.ListOperationsResponse),
        "CancelOperation": (operations_pb2.CancelOperationRequest, empty_pb2.Empty),
        "DeleteOperation": (operations_pb2.DeleteOperationRequest, empty_pb2.Empty),
    },
    "google.cloud.location.Locations": {
        "ListLocations": (locations_pb2.ListLocationsRequest, locations_pb2.ListLocationsResponse),
        "GetLocation": (locations_pb2.GetLocationRequest, locations_pb2.Location),
    },
}
_READING = ("Get", "List", "GenerateServiceIdentity")


class Service(grpc.GenericRpcHandler):  # type: ignore[type-arg, misc, unused-ignore]
    """Finds the method that a call names; everything else is UNIMPLEMENTED."""

    def __init__(self, handle: Handle, access: Access) -> None:
        self._handle, self._access = handle, access

    def service(self, details: Any) -> Any:
        """The handler of one call, by the path `/package.Service/Method`."""
        service, _, method = details.method.strip("/").rpartition("/")
        found = _types(service, method)
        if found is None:
            return None
        version, request, response = found

        async def answer(message: Message, context: Any) -> Message:
            fields = json_format.MessageToDict(message)
            headers = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
            try:
                # gRPC tells no server the host name that a client used; no web page speaks it.
                check_origin({**headers, "host": "localhost"})
                self._access.caller(headers.get("authorization", ""))
                result = await self._handle(version, method, fields)
            except ApiError as error:
                code = next(code for code in grpc.StatusCode if code.value[0] == error.grpc_code)
                await context.abort(code, error.message)
            return json_format.ParseDict(result, response(), ignore_unknown_fields=True)

        return grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=request.FromString, response_serializer=response.SerializeToString
        )


def _types(service: str, method: str) -> tuple[str, type[Message], type[Message]] | None:
    """Version, request class and response class of a method."""
    if service in _SHARED:
        shared = _SHARED[service].get(method)
        return ("v2", *shared) if shared else None
    version = service.removeprefix("google.cloud.tpu.").removesuffix(".Tpu")
    if version not in PROTOS:
        return None
    request = request_type(version, method)
    if request is None:
        return None
    if not method.startswith(_READING):
        return version, request, operations_pb2.Operation
    noun = method.removeprefix("Get") if method.startswith("Get") else method
    single = method.startswith("Get") and hasattr(PROTOS[version], noun) and method != "GetGuestAttributes"
    return version, request, message_type(version, noun if single else f"{method}Response")
