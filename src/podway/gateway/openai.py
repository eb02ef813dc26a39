"""What the gateway reads of the OpenAI API: the model a request names, how large it is, and how many tokens an answer took.

Bodies are looked at and never rewritten: fields the gateway does not know pass through. Errors have OpenAI's form, so that its
clients raise what they always raise.
"""

import re

import msgspec

from podway.decoding import from_json
from podway.gateway.table import RoutedService

# Requests that name a model; everything else goes by service.
PATHS = frozenset(
    {
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/embeddings",
        b"/v1/responses",
        b"/v1/rerank",
        b"/v1/score",
        b"/v1/tokenize",
        b"/v1/detokenize",
        b"/v1/audio/speech",
        b"/v1/images/generations",
    }
)
BYTES_PER_TOKEN = 4  # of English text; only to compare loads
USUAL_ANSWER = 256  # tokens, where a request sets no limit
_TAIL = 4096  # the usage of an answer stands in its last bytes


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that matter for routing; the rest of a body is not looked at."""

    model: str
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")

    @property
    def beginning(self) -> bytes:
        """The prompt as it stands in the body."""
        return bytes(self.messages) or bytes(self.prompt) or bytes(self.input)

    @property
    def tokens(self) -> int:
        """About how many tokens this will be to a replica."""
        asked = self.max_completion_tokens or self.max_tokens or self.max_output_tokens or USUAL_ANSWER
        return max(1, len(self.beginning) // BYTES_PER_TOKEN + min(max(asked, 0), 1 << 20))


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one answer; `exact` is False where the gateway counted events of a stream."""

    prompt: int = 0
    completion: int = 0
    exact: bool = True


class _Counts(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


def read_question(body: bytes) -> Question | str:
    """The question, or why it is none."""
    try:
        return from_json(body, Question)
    except msgspec.ValidationError as error:
        return str(error)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "the body is not valid JSON"
    except RecursionError:
        return "the body is nested too deeply"


_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


class UsageReader:
    """Reads an answer as it passes: its usage where it says so, else events of a stream."""

    def __init__(self, streamed: bool) -> None:
        self._streamed = streamed
        self._tail = b""
        self._events = 0

    def feed(self, data: bytes) -> None:
        """The next bytes of the body."""
        if self._streamed:
            self._events += data.count(b"data:")
        self._tail = data[-_TAIL:] if len(data) >= _TAIL else (self._tail + data)[-_TAIL:]

    @property
    def completion(self) -> int:
        """Tokens of the answer: as it says, else an event for each and one for the end."""
        reported = self._reported()
        return reported.completion if reported is not None else max(0, self._events - 1)

    def usage(self, question: Question) -> TokenUsage:
        """What the answer took."""
        reported = self._reported()
        if reported is not None:
            return reported
        if not self._streamed:
            return TokenUsage(exact=False)
        return TokenUsage(prompt=len(question.beginning) // BYTES_PER_TOKEN, completion=self.completion, exact=False)

    def _reported(self) -> TokenUsage | None:
        found = _USAGE.findall(self._tail)
        for text in reversed(found):
            try:
                counts = from_json(text, _Counts)
            except msgspec.DecodeError:
                continue
            return TokenUsage(
                prompt=counts.prompt_tokens or counts.input_tokens,
                completion=counts.completion_tokens or counts.output_tokens,
            )
        return None


class _ListedModel(msgspec.Struct, frozen=True):
    id: str
    created: int
    owned_by: str
    object: str = "model"


def model_list(services: list[RoutedService]) -> bytes:
    """The answer of `GET /v1/models`."""
    models = [_ListedModel(id=one.model or "", created=int(one.created), owned_by=one.name) for one in services]
    return msgspec.json.encode({"object": "list", "data": models})


def one_model(service: RoutedService) -> bytes:
    """The answer of `GET /v1/models/NAME`."""
    return msgspec.json.encode(
        _ListedModel(id=service.model or "", created=int(service.created), owned_by=service.name)
    )


def error_body(message: str, kind: str, code: str | None = None) -> bytes:
    """An error in OpenAI's form."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def error_event(message: str, *, inside_event: bool) -> bytes:
    """The end of a stream that broke: an event that clients raise, and the end they wait for."""
    body = error_body(message, "server_error", "replica_lost")
    return (b"\n\n" if inside_event else b"") + b"data: " + body + b"\n\ndata: [DONE]\n\n"
