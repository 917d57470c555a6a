"""transformers' continuous batching, served by rows: what `init_continuous_batching` returns under `install()`.

`generate_batch`, `continuous_batching_context_manager` and `transformers serve --continuous-batching` stay those of
transformers. They call the manager by the methods below, and get transformers' own type of output.
"""

import asyncio
import copy
import functools
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from kvlayers.batching.row_engine import Request, RowEngine
from kvlayers.errors import CapacityError, KVLayersError, OptionError
from kvlayers.generation import cache_by_name
from kvlayers.generation.install import SERVED
from kvlayers.generation.prefix_reuse import active_store
from kvlayers.generation.row_decoding import drafter_of
from kvlayers.upstream import generate_calls, model_types
from kvlayers.utils.options import check_whole_number

logger = logging.getLogger(__name__)

MAX_ROWS, CHUNK_TOKENS = 32, 512

IDLE_SECONDS = 0.1
"""How long a thread waits before it looks again whether the other one is still there."""

SECONDS_FOR_A_PLACE = 10
"""How long who asks waits for a place in a full queue, as in transformers. The thread may have ended meanwhile."""

PAGED = "paged|"
"""What stands before the name of an attention function that reads pages, which rows do not have."""

HONOURED = (
    "allow_block_sharing", "max_batch_tokens", "max_memory_percent", "max_queue_size", "max_requests_per_batch",
    "per_request_processors", "return_logprobs", "seed",
)  # fmt: skip
"""Attributes of a `ContinuousBatchingConfig` that mean something to rows."""

_KEPT = "_kvlayers_rows_manager"
"""The attribute of a model in which a manager waits for its next session."""


def init_continuous_batching(
    original: Callable[..., Any],
    model: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    *args: Any,
    **more: Any,
) -> Any:
    """For `init_continuous_batching`: a manager of rows, or transformers' own for models that rows refuse."""
    is_served = model.device.type == "cpu" if SERVED.get() is None else SERVED.get()
    try:
        if is_served:
            return vars(model).get(_KEPT) or RowsManager(
                model, generation_config or model.generation_config, continuous_batching_config
            )
    except KVLayersError as reason:
        _say_once(f"Continuous batching of {type(model).__name__} is that of transformers, without kvlayers: {reason}")
    return original(model, generation_config, continuous_batching_config, *args, **more)


def destroy_kept_manager(original: Callable[..., Any], model: Any) -> None:
    """For `destroy_cached_continuous_batching_manager`: a manager of rows that waits for its next session, too."""
    kept = vars(model).pop(_KEPT, None)
    if kept is not None:
        kept.destroy()
    original(model)


@functools.lru_cache(maxsize=64)
def _say_once(message: str) -> None:
    """Log a warning, which would be the same for each manager of a trainer that makes one in each step."""
    logger.warning(message)


class Outputs:
    """Outputs that wait for their callers, or are handed to the event loops of these."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Any] = deque()
        self._handlers: dict[str, tuple[Callable[[Any], object], asyncio.AbstractEventLoop]] = {}

    def handle(self, request_id: str, callback: Callable[[Any], object]) -> None:
        """Hand the outputs of a request to a function, in the event loop that runs now: also outputs that wait."""
        with self._changed:
            self._handlers[request_id] = callback, asyncio.get_running_loop()
            earlier, self._waiting = self._waiting, deque()
            for output in earlier:
                self.put(output)

    def forget(self, request_id: str) -> None:
        """Hand nothing more of a request to anybody."""
        with self._changed:
            self._handlers.pop(request_id, None)
            self._waiting = deque(output for output in self._waiting if output.request_id != request_id)

    def put(self, output: Any) -> None:
        """Deliver an output."""
        with self._changed:
            handler = self._handlers.get(output.request_id)
            if handler is None:
                self._waiting.append(output)
                self._changed.notify_all()
            else:
                # A client that has gone may have taken its loop along, at this very moment.
                with suppress(RuntimeError):
                    handler[1].call_soon_threadsafe(handler[0], output)
                if output.is_finished():
                    del self._handlers[output.request_id]

    def get(self, request_id: str | None, timeout: float | None, is_over: Callable[[], bool]) -> Any:
        """The first output, or the first of one request; `None` after `timeout` seconds, or if no more will come."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                for output in self._waiting:
                    if request_id in (None, output.request_id):
                        self._waiting.remove(output)
                        return output
                left = until - time.monotonic()
                if left <= 0 or is_over():
                    return None
                self._changed.wait(min(left, IDLE_SECONDS))


@dataclass(eq=False, kw_only=True)
class _Asked(Request):
    """A request with what its caller is told of it.

    Attributes:
        outputs: where its caller finds them.
        request_id: its name.
        is_streamed: whether each token is told.
        timestamps: when each token came, `None` if nobody asks.
        prompt: the ids of the prompt, on the host.
        created: when it came.
        began: when it left the queue, -1 before.
    """

    outputs: Outputs = field(default_factory=Outputs)
    request_id: str = ""
    is_streamed: bool = False
    timestamps: list[float] | None = None
    prompt: list[int] = field(default_factory=list)
    created: float = field(default_factory=time.perf_counter)
    began: float = -1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.on_token = self.tell

    def tell(self, token: int) -> bool:
        """Take note of a token, and tell it if the caller asks for each. It does not end the answer."""
        if self.timestamps is not None:
            self.timestamps.append(time.perf_counter())
        # The last one comes with the end.
        if self.is_streamed and not self.has_ended:
            self.outputs.put(self.output("DECODING"))
        return False

    @property
    def with_copies(self) -> "list[_Asked]":
        """The request, and its copies that have not joined."""
        return [self, *(each for each in self.copies if isinstance(each, _Asked))]

    def output(self, status: str, error: BaseException | None = None) -> Any:
        """What the caller gets: the tokens so far, and the name of a `RequestStatus`."""
        from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt,
            generated_tokens=self.new_ids.tolist(),
            logprobs=list(self.logprobs or ()),
            error=None if error is None else str(error),
            status=RequestStatus.FAILED if error is not None else RequestStatus[status],
            created_time=self.created,
            lifespan=(self.began, time.perf_counter() if status == "FINISHED" else -1),
            timestamps=None if self.timestamps is None else list(self.timestamps),
        )


class ThreadStatus:
    """What the thread of a manager is asked for, and what ended it.

    Attributes:
        fatal_error: what ended it, apart from `stop()`.
        is_finishing: whether it takes no more requests.
        is_stopping: whether it gives up the requests that it has.
        holders: the threads that have paused it.
    """

    def __init__(self) -> None:
        self.fatal_error: BaseException | None = None
        self.is_finishing = self.is_stopping = False
        self._changed = threading.Condition()
        self.holders: list[int] = []
        self._is_paused = False

    @contextmanager
    def pause(self, is_running: Callable[[], bool]) -> Iterator[None]:
        """A block in which the thread waits between two steps. Blocks of several callers overlap."""
        holder = threading.get_ident()
        try:
            with self._changed:
                self.holders.append(holder)
                while not self._is_paused and is_running():
                    self._changed.wait(IDLE_SECONDS)
            if not is_running():
                raise RuntimeError(
                    "The manager must be running to be paused: call start() first."
                ) from self.fatal_error
            yield
        finally:
            # Also if the wait was interrupted.
            with self._changed:
                self.holders.remove(holder)
                self._changed.notify_all()

    def wait_while_held(self) -> None:
        """Called by the thread between two steps."""
        with self._changed:
            self._is_paused = bool(self.holders)
            while self.holders:
                self._changed.notify_all()
                self._changed.wait()
            self._is_paused = False


class RowsManager:
    """Answers requests by rows, in a thread of its own. Its methods are those of `ContinuousBatchingManager`.

    Args:
        model: a decoder-only model.
        generation_config: what requests have in common.
        batching_config: a `ContinuousBatchingConfig`, of which `HONOURED` means something; `None` for the default.

    Attributes:
        warmed_up: `True`, since nothing is compiled.
        num_return_sequences: answers to a prompt whose request does not say how many.
        background_thread_status: what the thread was asked for, and what ended it.

    Raises:
        OptionError, RegistryError, ConfigError: the model takes no rows, or there is no such cache.
    """

    def __init__(self, model: Any, generation_config: Any, batching_config: Any) -> None:
        self.model, self.generation_config = model.eval(), generation_config
        self.continuous_batching_config, self.warmed_up = batching_config, True
        self.background_thread_status, self._outputs = ThreadStatus(), Outputs()
        given = {} if batching_config is None else vars(batching_config)
        usual = {} if batching_config is None else vars(type(batching_config)())
        others = [name for name, value in given.items() if name not in HONOURED and value != usual.get(name)]
        if others:
            _say_once(f"Rows have no use for {', '.join(sorted(others))} of a ContinuousBatchingConfig.")
        self._keeps_logprobs, self._seed = bool(given.get("return_logprobs")), given.get("seed")
        self._positions = model_types.most_positions(model.config)
        config = self._config_with({}, 1)
        self.num_return_sequences: int = config.num_return_sequences or 1
        self._engine = self._engine_for(config, given)
        self._numbers, self._work = itertools.count(), threading.Event()
        self._input: queue.Queue[_Asked] = queue.Queue(given.get("max_queue_size") or 0)
        self._asked: dict[str, _Asked] = {}
        self._cancelled: deque[_Asked | None] = deque()
        self._thread: threading.Thread | None = None

    def _config_with(self, options: dict[str, Any], prompt_tokens: int) -> Any:
        """The full config of a request with options of its own, and a prompt of so many tokens."""
        own = copy.deepcopy(self.generation_config)
        if left := own.update(**options):
            raise OptionError(
                f"`options` must be those of a GenerationConfig, got {', '.join(sorted(left))}: leave them out."
            )
        config, _ = generate_calls.full_generation_config(self.model, {"generation_config": own})
        asked = "token_healing" if config.token_healing else config.get_generation_mode().value
        # Drafts are those of the manager.
        if asked not in ("greedy_search", "sample", "assisted_generation"):
            raise OptionError(
                f"`options` must ask for greedy search or samples, got {asked}: leave it out, or call generate()."
            )
        if config.max_new_tokens is None:
            # Until the model has no positions left. A model that counts none has no end of them.
            longest = options.get("max_length") or self._positions
            config.max_new_tokens = MAX_ROWS * CHUNK_TOKENS if longest is None else longest - prompt_tokens
        check_whole_number(config.max_new_tokens, "`max_new_tokens`", 1, of="tokens")
        # What transformers' continuous batching has for answers that end by their length alone.
        if config.eos_token_id == -1:
            config.eos_token_id = None
        generate_calls.prepare_special_tokens(self.model, config)
        return config

    def _engine_for(self, config: Any, given: dict[str, Any]) -> "RowEngine[_Asked]":
        named = copy.copy(config)
        asked = cache_by_name.resolve_name(
            self.model, named, cache_by_name.requested_name({"generation_config": config}), is_given_a_cache=False
        )
        name = cache_by_name.DYNAMIC if asked == cache_by_name.CONTINUOUS_BATCHING else asked
        return RowEngine[_Asked](
            self.model,
            config,
            cache_by_name.requested_cache(name, named.cache_config),
            active_store.for_call() if given.get("allow_block_sharing", True) else None,
            given.get("max_requests_per_batch") or MAX_ROWS,
            None if given.get("max_memory_percent") is None else Fraction(given["max_memory_percent"]),
            given.get("max_batch_tokens") or CHUNK_TOKENS,
            drafter_of(config, config.prompt_lookup_num_tokens, None),
        )

    def warmup(self) -> None:
        """Do nothing: rows compile nothing."""

    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        if self.is_running():
            logger.warning("The manager is running already.")
            return
        self.background_thread_status = ThreadStatus()
        # A process may end whatever its requests do.
        self._thread = threading.Thread(target=self._run, name="kvlayers rows", daemon=True)
        self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """End the thread, after all requests or at once.

        Args:
            block: wait until it has ended.
            timeout: seconds to wait at most.
            keep_for_next_session: leave the manager with its model, for the next `init_continuous_batching`.
            hard_stop: requests that have not ended fail.

        Raises:
            RuntimeError: the caller has paused the manager.
        """
        status = self.background_thread_status
        if threading.get_ident() in status.holders:
            raise RuntimeError("The manager must not be stopped from inside a pause: leave the block of pause() first.")
        status.is_finishing, status.is_stopping = True, status.is_stopping or hard_stop
        self._work.set()
        if block and self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("The thread of continuous batching goes on after %s seconds.", timeout)
        if keep_for_next_session and self._thread is not None:
            vars(self.model)[_KEPT] = self

    def destroy(self) -> None:
        """Stop, and keep nothing."""
        self.stop()

    def pause(self) -> AbstractContextManager[None]:
        """A block in which no step is taken, so that the model may be changed. Requests go on after it.

        Raises:
            RuntimeError: the manager does not run.
        """
        self._work.set()
        return self.background_thread_status.pause(self.is_running)

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> str | None:
        """Ask for an answer.

        Args:
            input_ids: ids of the prompt.
            request_id: a name; one is made if there is none.
            max_new_tokens: most tokens of the answer.
            streaming: whether each token is an output.
            record_timestamps: whether outputs say when each token came.
            eos_token_id: tokens that end the answer.
            tokenizer: for stop strings.
            options: other options of a `GenerationConfig`, such as `temperature`. Wrong ones fail this request alone.

        Returns:
            Its name; `None` if the manager takes no more requests.

        Raises:
            OptionError: another request of this name has not ended.
            queue.Full: as many requests wait as may, and none has been taken for ten seconds.
        """
        status = self.background_thread_status
        if status.fatal_error is not None or status.is_finishing:
            logger.warning("A request was dropped: the manager has been stopped, or its thread has failed.")
            return None
        request_id = (
            next(name for name in map("req_{}".format, self._numbers) if name not in self._asked)
            if request_id is None
            else request_id
        )
        options |= {
            name: value
            for name, value in (("max_new_tokens", max_new_tokens), ("eos_token_id", eos_token_id))
            if value is not None
        }
        prompt, config, error = list(input_ids), self.generation_config, None
        ids = torch.empty(1, 0, dtype=torch.int64)
        try:
            ids = torch.as_tensor([prompt], dtype=torch.int64, device=self.model.device)
            if not prompt or (self._positions is not None and len(prompt) >= self._positions):
                raise CapacityError(
                    f"`input_ids` must have 1 token at least, and fewer than the {self._positions} positions of "
                    f"the model, got {len(prompt)}: shorten the prompt."
                )
            config = self._config_with(options, len(prompt))
        except Exception as reason:
            error = reason
        first, *copies = (
            _Asked(
                ids,
                config=config,
                given={"tokenizer": tokenizer},
                logprobs=[] if self._keeps_logprobs else None,
                error=error,
                outputs=self._outputs,
                request_id=name,
                is_streamed=streaming,
                timestamps=[] if record_timestamps else None,
                prompt=prompt,
            )
            for name in (
                request_id,
                *(
                    f"{request_id}__child#{index}"
                    for index in range((options.get("num_return_sequences") or self.num_return_sequences) - 1)
                ),
            )
        )
        first.copies = copies
        # At once, as other threads may ask by the same name.
        own = [each for each in first.with_copies if self._asked.setdefault(each.request_id, each) is each]
        if len(own) <= len(copies):
            for each in own:
                self._asked.pop(each.request_id, None)
            raise OptionError(f"`request_id` must be one that no other request has, got {request_id!r}: leave it out.")
        try:
            self._input.put(first, timeout=SECONDS_FOR_A_PLACE)
        except queue.Full:
            self.cancel_request(request_id)
            raise
        self._work.set()
        return request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str | None]:
        """Ask for several answers; return their names in the order of the prompts."""
        return [self.add_request(ids, None, max_new_tokens, streaming, record_timestamps, **options) for ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """Give a request up: it has no further output."""
        self._cancelled.append(self._asked.get(request_id))
        self._outputs.forget(request_id)
        self._work.set()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Any:
        """The next output, or the next of one request; `None` after `timeout` seconds, or if no more will come."""
        return self._outputs.get(request_id, timeout, lambda: not self.is_running())

    def __iter__(self) -> Iterator[Any]:
        """All outputs, as they come, while the manager runs."""
        return iter(self.get_result, None)

    def request_id_iter(self, request_id: str) -> Iterator[Any]:
        """The outputs of one request, up to the last one. It ends without one if the request is given up."""
        while (
            output := self._outputs.get(
                request_id, None, lambda: request_id not in self._asked or not self.is_running()
            )
        ) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[Any], object]) -> None:
        """Hand the outputs of a request to a function, in the event loop that runs now."""
        self._outputs.handle(request_id, callback)

    @property
    def metrics(self) -> dict[str, int]:
        """How many requests wait, are read and are decoded."""
        rows = sum(request.last >= 0 for request in self._engine.held)
        held = len(self._engine.held)
        return {"waiting": len(self._asked) - held, "reading": held - rows, "decoding": rows}

    @torch.no_grad()
    def _run(self) -> None:
        status = self.background_thread_status
        attention = model_types.attention_implementation(self.model.config) or ""
        if attention.startswith(PAGED):
            self.model.set_attn_implementation(attention.removeprefix(PAGED))
        try:
            if self._seed is not None:
                torch.manual_seed(self._seed)
            while self._turn(status):
                pass
            reason: BaseException = RuntimeError("The manager was stopped before this request had ended.")
        except Exception as error:
            logger.exception("Continuous batching has failed, and so have all requests.")
            status.fatal_error = reason = error
        if attention.startswith(PAGED):
            self.model.set_attn_implementation(attention)
        for asked in list(self._asked.values()):
            self._engine.cancel(asked)
            self._end(asked, reason)

    def _turn(self, status: ThreadStatus) -> bool:
        """Take in what callers have asked for, and take a step. Returns whether there is another turn."""
        status.wait_while_held()
        if status.is_stopping:
            return False
        while self._cancelled:
            asked = self._cancelled.popleft()
            for each in () if asked is None else asked.with_copies:
                self._engine.cancel(each)
                # Its name may be that of another request by now, of which nothing has come yet.
                self._outputs.forget(each.request_id)
                if self._asked.get(each.request_id) is each:
                    del self._asked[each.request_id]
        for failed in self._engine.admit(self._next):
            self._end(failed, failed.error)
        if self._engine.held:
            for ended in self._engine.advance():
                self._end(ended, ended.error)
        elif status.is_finishing and self._input.empty():
            return False
        else:
            self._work.wait(IDLE_SECONDS)
            self._work.clear()
        return True

    def _next(self) -> _Asked | None:
        # Nobody else takes from it.
        while not self._input.empty():
            asked = self._input.get()
            if self._asked.get(asked.request_id) is asked:
                asked.began = time.perf_counter()
                return asked
        return None

    def _end(self, asked: _Asked, error: BaseException | None) -> None:
        """Tell how a request ended, and its copies if it has not been read; of one that is given up, nothing."""
        for each in () if asked in self._cancelled else asked.with_copies:
            # Who was given up may have a namesake.
            if self._asked.get(each.request_id) is each:
                self._outputs.put(each.output("FINISHED", error))
                # Only now, as whoever waits for outputs looks whether there will be more.
                del self._asked[each.request_id]
