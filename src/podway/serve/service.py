"""The model that is served, as the API sees it: its tokenizer, grammars, replicas, and the answers under way (no jax).

Work that takes long (text of many tokens, chat templates over many messages) is done in threads, so that the event loop goes
on; what is too large for the model is refused before any of it.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from podway.errors import UserError
from podway.model.tokenizer import ModelTokenizer
from podway.serve.adapter_registry import AdapterRegistry, LoadedAdapter
from podway.serve.delivery import Delivery
from podway.serve.grammar import Grammars
from podway.serve.loop import Loop, TokenUpdate
from podway.serve.metrics import Metrics
from podway.serve.openai import RequestError, sampling_defaults
from podway.serve.output_parser import ToolFormat, format_of, reasons
from podway.serve.responses import Answer

T = TypeVar("T")
_INLINE = 4096  # characters that are tokenized at once on the event loop: a fraction of a millisecond
_THREADS = 4


class Service:
    """There are `loops`, one for each replica, once it is warm."""

    def __init__(
        self,
        name: str,
        tokenizer: ModelTokenizer,
        max_len: int,
        *,
        tool_format: ToolFormat | None = None,
        reasoning: bool | None = None,
    ) -> None:
        self.name, self.tokenizer, self.max_len = name, tokenizer, max_len
        template = tokenizer.template.source if tokenizer.template else ""
        self.tool_format: ToolFormat = tool_format or format_of(template)
        self.reasoning = reasons(template) if reasoning is None else reasoning
        self.defaults = sampling_defaults(tokenizer.generation)
        self.grammars = Grammars(tokenizer)
        self.created = int(time.time())
        self.loops: list[Loop] = []
        self.status = "starting"
        self.draining = False
        self.open: set[Answer] = set()
        self.adapters: AdapterRegistry | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")
        self._turn = 0
        self._delivery: Delivery[TokenUpdate] | None = None

    def delivery(self) -> Delivery[TokenUpdate]:
        """Of the event loop that runs."""
        if self._delivery is None or not self._delivery.alive:
            self._delivery = Delivery()
        return self._delivery

    @property
    def healthy(self) -> bool:
        """Warm, and no replica has failed."""
        return bool(self.loops) and all(loop.failure is None for loop in self.loops)

    @property
    def ready(self) -> bool:
        return self.healthy and not self.draining

    def metrics(self) -> Metrics:
        """Of all replicas together."""
        return Metrics.sum([loop.metrics for loop in self.loops], self.name)

    def least_loaded_replica(self) -> Loop:
        """The replica that has the least to do; of equals, the next in turn. One that failed is asked last, and refuses."""
        if self.draining:
            raise RequestError("the server is stopping", status=503)
        if not self.loops:
            raise RequestError(f"the model is not ready: {self.status}", status=503)
        self._turn += 1
        in_turn = [self.loops[(self._turn + at) % len(self.loops)] for at in range(len(self.loops))]
        return min(in_turn, key=lambda loop: (loop.failure is not None, loop.load))

    def fail_all(self, error: UserError) -> None:
        """Every answer under way ends with this error. From any thread."""
        for answer in list(self.open):
            answer.on_update(TokenUpdate(finish="error", error=error))

    def cards(self) -> list[dict[str, object]]:
        """What /v1/models says of the model and of its adapters."""
        return [self.card(None), *(self.card(one) for one in (self.adapters.all() if self.adapters else []))]

    def card(self, adapter: LoadedAdapter | None) -> dict[str, object]:
        """What /v1/models says of one."""
        known = (self.name, self.created, self.name, None)
        if adapter is not None:
            known = (adapter.name, adapter.created, adapter.path, self.name)  # type: ignore[assignment]
        name, created, root, parent = known
        return {
            "id": name, "object": "model", "created": created, "owned_by": "podway", "root": root, "parent": parent,
            "max_model_len": self.max_len,
        }  # fmt: skip

    def adapter_of(self, asked: str | None) -> LoadedAdapter | None:
        """The adapter of this name; None: the model itself. Others are refused."""
        if asked in (None, "", self.name):
            return None
        found = self.adapters.find(asked) if self.adapters else None
        if found is None:
            raise RequestError(
                f"there is no model {asked[:200]!r}; this server has {self.name!r}", status=404, param="model",
                code="model_not_found",
            )  # fmt: skip
        return found

    def load_adapter(self, name: str, path: str) -> None:
        """By the API, for as long as the files take."""
        registry = self._updatable()
        if not self.loops:
            raise RequestError(f"the model is not ready: {self.status}", status=503)
        registry.load(name, path, self.loops, lambda: {answer.request.adapter for answer in list(self.open)})

    def unload_adapter(self, name: str) -> None:
        self._updatable().unload(name)

    def _updatable(self) -> AdapterRegistry:
        if self.adapters is None or not self.adapters.updatable:
            flags = "--enable-lora and --allow-lora-updates" if self.adapters is None else "--allow-lora-updates"
            raise RequestError(f"this server takes no adapters: start it with {flags}", status=403)
        return self.adapters

    def check_ids(self, ids: list[int], name: str) -> None:
        if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.tokenizer.vocab):
            return
        for id in ids:
            if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < self.tokenizer.vocab:
                raise RequestError(f"{name}: {str(id)[:40]} is not a token id below {self.tokenizer.vocab}", param=name)

    def check_length(self, size: int, param: str) -> None:
        """Refuse a text of so many bytes that has more tokens than the model takes, however it is cut."""
        if size > self.max_len * self.tokenizer.longest:
            raise RequestError(
                f"{param} has {size} bytes: more than {self.max_len} tokens, and the limit is {self.max_len} tokens",
                param=param,
                code="context_length_exceeded",
            )

    async def encode(self, text: str, special: bool) -> list[int]:
        """The tokens of a text."""
        return await self.beside(len(text) > _INLINE, self.tokenizer.encode, text, special)

    async def encode_all(self, texts: list[str], special: bool) -> list[list[int]]:
        """The tokens of each text."""
        long = sum(map(len, texts)) > _INLINE or len(texts) > 32
        return await self.beside(long, lambda: [self.tokenizer.encode(text, special) for text in texts])

    async def beside(self, long: bool, work: Callable[..., T], *arguments: object) -> T:
        """Do the work, in a thread if it is long."""
        if not long:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))
