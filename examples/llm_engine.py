"""Continuous batching of a transformers causal model on device xla.

A cache of fixed size has a row, a slot, for each request that is being answered. A prompt is put into a slot by a graph
of its bucket, a length that it is padded to; then one graph advances all slots by a token, whichever are in use. What
is different from step to step (tokens, positions, temperatures, which slot) are tensors on the device, so nothing is
compiled after the warm-up. Tokens are drawn on the device, and read one step late: the device works meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

import torch_xla


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, (slots, heads, length, head dimension)."""

    is_compileable = True

    def __init__(self, slots: int, length: int) -> None:
        super().__init__()
        self.slots, self.length = slots, length
        self.slot: Tensor | None = None  # the row of a prompt, (1,); None while all rows advance by a token
        self.positions: Tensor | None = None  # where each row's token goes, (slots,)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes the arrays, at the first call."""
        for name, states in (("keys", key_states), ("values", value_states)):
            _, heads, _, size = states.shape
            setattr(self, name, states.new_zeros(self.slots, heads, self.length, size))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores keys and values; gives those that the queries look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.slot is not None:
            count = key_states.shape[2]
            self.keys[:, :, :count].index_copy_(0, self.slot, key_states)
            self.values[:, :, :count].index_copy_(0, self.slot, value_states)
            return key_states, value_states
        here = self.positions[:, None, None, None].expand_as(key_states)
        self.keys.scatter_(2, here, key_states)
        self.values.scatter_(2, here, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask; the engine makes masks itself."""
        return self.length, 0

    def get_seq_length(self) -> int:
        """Rows have lengths of their own."""
        return 0

    def get_max_length(self) -> int:
        """How long a row may get."""
        return self.length


@dataclass
class Request:
    """A prompt to go on with.

    Attributes:
        tokens: The prompt.
        limit: At most so many tokens are added.
        temperature: 0 takes the likeliest token each time.
        top_p: Tokens are drawn from the likeliest that have this probability together.
        stop: Tokens that end the answer.
        asked: When it came, in seconds.
        answer: Gets the tokens when all are there.
        pieces: Gets each token, and None at the end.
    """

    tokens: Sequence[int]
    limit: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: frozenset[int] = frozenset()
    asked: float = field(default_factory=time.perf_counter)
    answer: Future[list[int]] = field(default_factory=Future)
    pieces: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)
    found: list[int] = field(default_factory=list)
    _over: bool = False

    def add(self, token: int) -> None:
        """Takes a token, unless the answer is over."""
        if self._over:
            return
        if token not in self.stop:
            self.found.append(token)
            self.pieces.put(token)
        if token in self.stop or len(self.found) >= self.limit:
            self.finish()

    @property
    def over(self) -> bool:
        """Whether the answer is complete."""
        return self._over

    def finish(self, error: BaseException | None = None) -> None:
        """Gives the answer to who waits for it."""
        self._over = True
        self.pieces.put(None)
        if error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(self.found)


class Engine:
    """Answers requests with one model.

    Args:
        model: A causal model of transformers, on an xla device.
        slots: How many requests are answered at a time.
        length: Longest prompt and answer together.
        buckets: Lengths that prompts are padded to.
    """

    def __init__(self, model: nn.Module, slots: int, length: int, buckets: Sequence[int]) -> None:
        self.buckets = sorted(buckets)
        if self.buckets[-1] > length:
            raise ValueError(f"got a bucket of {self.buckets[-1]}, expected at most the cache's length {length}")
        self.model, self.slots, self.length = model.eval(), slots, length
        self.device = next(model.parameters()).device
        self.layers = [SlotLayer(slots, length) for _ in range(model.config.num_hidden_layers)]
        self.cache = Cache(layers=self.layers)
        self.tokens = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.positions = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.settings = torch.ones(slots, 2, device=self.device)  # temperature and top_p
        self.columns = torch.arange(length, device=self.device)
        torch_xla.sync()
        self.waiting: deque[Request] = deque()
        self.taken: list[Request | None] = [None] * slots
        self.steps = 0
        self._unread: tuple[Tensor, list[Request | None]] | None = None  # tokens of a step, and whose they are
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def bucket_of(self, count: int) -> int:
        """The length that a prompt of so many tokens is padded to.

        Raises:
            ValueError: It is longer than the largest bucket.
        """
        for bucket in self.buckets:
            if count <= bucket:
                return bucket
        raise ValueError(f"got a prompt of {count} tokens, expected at most {self.buckets[-1]}, the largest bucket")

    def submit(self, request: Request) -> Request:
        """Takes a request; its answer comes by itself.

        Raises:
            ValueError: The prompt is empty, or too long.
        """
        if not request.tokens:
            raise ValueError("got an empty prompt, expected at least one token")
        self.bucket_of(len(request.tokens))
        request.limit = min(request.limit, self.length - len(request.tokens))
        if request.limit < 1:
            raise ValueError(f"got no room for an answer, expected a prompt of fewer than {self.length} tokens")
        with self._changed:
            self.waiting.append(request)
            self._changed.notify()
        return request

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compiles the graph of each bucket and that of a step."""
        with torch_xla.debug.new_graphs_expected():
            for bucket in self.buckets:
                for _ in range(2):  # the first makes the cache
                    self._prefill(Request([0] * bucket, 1), 0)
        for _ in range(3):
            self._advance()
        torch_xla.sync(wait=True)

    def start(self) -> None:
        """Answers requests in a thread from now on."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self.waiting or any(self.taken))
                    if self._stopping:
                        return
                self._admit()
                unread, self._unread = self._unread, (self._advance(), list(self.taken))
                if unread is not None:
                    self._hand_out(*unread)
        except BaseException as error:
            for request in [*self.taken, *self.waiting]:
                if request is not None and not request.over:
                    request.finish(error)
            raise

    def _admit(self) -> None:
        """Puts waiting prompts into free slots."""
        for slot, request in enumerate(self.taken):
            if request is None and self.waiting:
                new = self.waiting.popleft()
                self._prefill(new, slot)
                self.taken[slot] = new

    def _prefill(self, request: Request, slot: int) -> None:
        """Runs a prompt; its next token becomes the slot's."""
        bucket = self.bucket_of(len(request.tokens))
        padded = torch.zeros(1, bucket, dtype=torch.long)
        padded[0, : len(request.tokens)] = torch.tensor(list(request.tokens))
        where = torch.tensor([slot], device=self.device)
        last = torch.tensor([len(request.tokens) - 1], device=self.device)
        settings = torch.tensor([[request.temperature, request.top_p]], device=self.device)
        own = self.columns[:bucket]
        mask = (own[None, :] <= own[:, None])[None, None]
        hidden = self._forward(padded.to(self.device), own[None], mask, where)
        logits = self.model.lm_head(hidden[0].index_select(0, last))
        self.settings.index_copy_(0, where, settings)
        # The token is the next step's input, and its position the first one behind the prompt.
        self.tokens.index_copy_(0, where, draw(logits, settings))
        self.positions.index_copy_(0, where, last + 1)
        torch_xla.sync()  # whatever comes next is another graph

    def _advance(self) -> Tensor:
        """Starts a step of all slots; gives the tokens that went into it, which are not waited for."""
        shown = self.tokens.clone()
        mask = (self.columns[None, :] <= self.positions[:, None])[:, None, None]
        hidden = self._forward(self.tokens[:, None], self.positions[:, None], mask, None)
        self.tokens.copy_(draw(self.model.lm_head(hidden[:, -1]), self.settings))
        # Slots that nobody uses stay inside the cache.
        self.positions.copy_((self.positions + 1).clamp(max=self.length - 1))
        torch_xla.sync()
        self.steps += 1
        return shown

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, slot: Tensor | None) -> Tensor:
        for layer in self.layers:
            layer.slot, layer.positions = slot, self.positions
        return self.model.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state

    def _hand_out(self, tokens: Tensor, whose: Sequence[Request | None]) -> None:
        """Reads a step's tokens and gives them to the requests; those that are over leave their slots."""
        for slot, (token, request) in enumerate(zip(tokens.tolist(), whose, strict=True)):
            if request is None:
                continue
            request.add(token)
            if request.over and self.taken[slot] is request:
                self.taken[slot] = None


def draw(logits: Tensor, settings: Tensor) -> Tensor:
    """A token for each row, (N,), of logits (N, vocabulary), with temperature and top_p in (N, 2)."""
    temperature, top_p = settings[:, :1], settings[:, 1:]
    scaled = logits.float() / temperature.clamp(min=1e-4)
    ordered, order = scaled.sort(dim=-1, descending=True)
    chances = ordered.softmax(-1)
    ordered = ordered.masked_fill(chances.cumsum(-1) - chances >= top_p, -torch.inf)
    noise = -torch.rand_like(ordered).clamp(min=1e-20).log()
    pick = (ordered - noise.log()).argmax(-1, keepdim=True)
    drawn = order.gather(-1, pick)[:, 0]
    return torch.where(temperature[:, 0] > 0, drawn, logits.argmax(-1))
