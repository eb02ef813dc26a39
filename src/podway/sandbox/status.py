"""How Google's APIs say no: one name, which is a number over gRPC and another over HTTP."""

from podway.sandbox.jsons import JsonObject

# google/rpc/code.proto: the name, its gRPC number, and the HTTP status the same file maps it to.
STATUSES: dict[str, tuple[int, int]] = {
    "OK": (0, 200),
    "CANCELLED": (1, 499),
    "UNKNOWN": (2, 500),
    "INVALID_ARGUMENT": (3, 400),
    "DEADLINE_EXCEEDED": (4, 504),
    "NOT_FOUND": (5, 404),
    "ALREADY_EXISTS": (6, 409),
    "PERMISSION_DENIED": (7, 403),
    "RESOURCE_EXHAUSTED": (8, 429),
    "FAILED_PRECONDITION": (9, 400),
    "ABORTED": (10, 409),
    "OUT_OF_RANGE": (11, 400),
    "UNIMPLEMENTED": (12, 501),
    "INTERNAL": (13, 500),
    "UNAVAILABLE": (14, 503),
    "UNAUTHENTICATED": (16, 401),
    # Cloud Storage's own, which has no gRPC number for them: what was asked under a condition.
    "CONDITION_NOT_MET": (9, 412),
    "NOT_MODIFIED": (9, 304),
}


class ApiError(Exception):
    """A request that is refused, or an operation that failed."""

    def __init__(self, status: str, message: str, *, details: tuple[JsonObject, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.details = details

    @property
    def grpc_code(self) -> int:
        """As google.rpc.Status has it."""
        return STATUSES[self.status][0]

    @property
    def http_code(self) -> int:
        """As an HTTP answer has it."""
        return STATUSES[self.status][1]

    def as_http(self) -> JsonObject:
        """The body of an HTTP answer."""
        more: JsonObject = {"details": list(self.details)} if self.details else {}
        return {"error": {"code": self.http_code, "message": self.message, "status": self.status, **more}}

    def as_rpc(self) -> JsonObject:
        """google.rpc.Status, as an operation or a failed resource holds it."""
        return {"code": self.grpc_code, "message": self.message}


def not_found(name: str) -> ApiError:
    """The resource is not there."""
    return ApiError("NOT_FOUND", f"Resource '{name}' was not found")


def already_exists(name: str) -> ApiError:
    """The name is taken."""
    return ApiError("ALREADY_EXISTS", f"Resource '{name}' already exists")


def invalid(message: str) -> ApiError:
    """The request makes no sense."""
    return ApiError("INVALID_ARGUMENT", message)


def out_of_order(message: str) -> ApiError:
    """The request makes sense, but not now."""
    return ApiError("FAILED_PRECONDITION", message)
