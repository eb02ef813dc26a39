"""JSON as Google's protos want it: enums by name, numbers and booleans from query strings, unknown fields refused.

The official protos are the schema. gcloud knows fields that they do not; those are listed here and passed on as they are.
"""

from typing import NoReturn, cast

from google.cloud import tpu_v1, tpu_v2, tpu_v2alpha1
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from podway.sandbox.jsons import JsonObject
from podway.sandbox.status import invalid

PROTOS = {"v1": tpu_v1, "v2": tpu_v2, "v2alpha1": tpu_v2alpha1}
# gcloud 528's own schema of v2alpha1 is wider than the published one.
GCLOUD_ONLY = {
    "provisioningModel",
    "reservationName",
    "terminationTimestamp",
    "runDuration",
    "trafficConfig",
    "workerIds",
    "requestedDuration",
}
_OPAQUE = {"google.protobuf.Timestamp", "google.protobuf.Duration", "google.protobuf.FieldMask", "google.protobuf.Any"}


def message_type(version: str, name: str) -> type[Message]:
    """The protobuf class (not its proto-plus wrapper) of a message of the API."""
    found: type[Message] = getattr(PROTOS[version], name).pb()
    return found


def request_type(version: str, method: str) -> type[Message] | None:
    """The class of a method's request, or None where the version has no such method."""
    wrapper = getattr(PROTOS[version], f"{method}Request", None)
    return wrapper.pb() if wrapper is not None else None


def descriptor_of(message: type[Message]) -> Descriptor:
    """The fields of a message; its stubs allow for a second class that is the same at run time."""
    return cast(Descriptor, message.DESCRIPTOR)


def named(descriptor: Descriptor, value: object, path: str = "") -> JsonObject:
    """A JSON object in the shape of a message, its enums by name and its scalars of the right kind."""
    if not isinstance(value, dict):
        raise invalid(f"Invalid value at '{path}': an object is expected.")
    fields = {field.json_name: field for field in descriptor.fields} | {
        field.name: field for field in descriptor.fields
    }
    shaped: JsonObject = {}
    for key, item in value.items():
        field = fields.get(key)
        where = f"{path}.{key}" if path else key
        if field is not None:
            shaped[field.json_name] = _field(field, item, where)
        elif key in GCLOUD_ONLY:
            shaped[key] = item
        else:
            raise invalid(f"Invalid JSON payload received. Unknown name \"{key}\" at '{path}': Cannot find field.")
    return shaped


def as_numbers(descriptor: Descriptor, value: object) -> object:
    """The same object with enums by number, for clients that ask for them so."""
    if not isinstance(value, dict) or descriptor.full_name in _OPAQUE:
        return value
    fields = {field.json_name: field for field in descriptor.fields}
    shown = dict(value)
    for key, item in value.items():
        field = fields.get(key)
        if field is None or _is_map(field):
            continue
        each = item if isinstance(item, list) else [item]
        if field.enum_type is not None:
            numbers = [
                field.enum_type.values_by_name[one].number if one in field.enum_type.values_by_name else one
                for one in each
            ]
        elif field.message_type is not None:
            numbers = [as_numbers(field.message_type, one) for one in each]
        else:
            continue
        shown[key] = numbers if isinstance(item, list) else numbers[0]
    return shown


def _field(field: FieldDescriptor, item: object, where: str) -> object:
    if item is None:
        return None
    if _is_map(field):
        return dict(item) if isinstance(item, dict) else _refuse(where, "an object")
    if field.is_repeated:
        items = item if isinstance(item, list) else [item]
        return [_one(field, one, where) for one in items]
    return _one(field, item, where)


def _one(field: FieldDescriptor, item: object, where: str) -> object:
    if field.enum_type is not None:
        return _enum(field.enum_type, item, where)
    if field.message_type is not None:
        return item if field.message_type.full_name in _OPAQUE else named(field.message_type, item, where)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return item if isinstance(item, bool) else str(item).lower() == "true"
    if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64):
        try:
            return int(item if isinstance(item, str | int | float) else "")
        except ValueError:
            _refuse(where, "a number")
    return item if isinstance(item, str) else _refuse(where, "a string")


def _enum(kind: EnumDescriptor, item: object, where: str) -> str:
    if isinstance(item, str) and not item.isdecimal():
        # gcloud knows names that the protos do not (TPU7X); whether they mean anything is for the reader to say.
        return item
    number = int(item) if isinstance(item, str | int) else -1
    if number not in kind.values_by_number:
        _refuse(where, f"a value of {kind.name}")
    return str(kind.values_by_number[number].name)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _refuse(where: str, wanted: str) -> NoReturn:
    raise invalid(f"Invalid value at '{where}': {wanted} is expected.")
