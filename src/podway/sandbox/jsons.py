"""JSON of the cloud's APIs: bodies and resources that are kept, changed and shown as clients wrote them."""

from typing import Any

JsonObject = dict[str, Any]  # an object of any shape; what is needed of it is checked where it is read
