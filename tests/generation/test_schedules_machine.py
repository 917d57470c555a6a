"""Random schedules of what is done to rows, documents and stores; each answer is that of a model without a cache."""

import contextlib
import copy
import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

import families
import kvlayers
from chats import CHATML, answer_without_cache, greedy, tokenizer_with
from kvlayers.errors import InterruptedPassError, KVLayersError, RollbackError, UnsupportedLayerError
from models import read, row_logits
from vision_models import inputs, seeing_model

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3600)]

MOST = 40
VOCAB = 90
ROOM = 60
"""Tokens for which a store has memory: about three texts."""

TOKENIZER = tokenizer_with(CHATML)

texts = st.lists(st.integers(3, VOCAB), min_size=1, max_size=9)


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would end the tests where they fail."""


class Schedules(RuleBasedStateMachine):
    """A cache of several rows, another one, the texts that they hold, and a store of their prompts.

    Attributes:
        cache: the cache in hand.
        rows: the text of each of its rows, as ids.
        other: another cache of one row, and its text.
    """

    @initialize(family=st.sampled_from(["llama", "gemma3", "mamba2", "jamba"]), text=texts)
    def begin(self, family: str, text: list[int]) -> None:
        self.model = families.model_of(family)
        self.attends_fully = family == "llama"
        self.store = kvlayers.PrefixStore(ROOM * 2 * 4 * 2 * 64, snapshot_tokens=4)
        self.pins: list[list[int]] = []
        self.cache, self.rows = self.read(text), [text]
        self.other = self.read([5, 6, 7]), [5, 6, 7]
        self.chat = kvlayers.Chat(self.model, TOKENIZER, prefix_store=self.store)

    def read(self, text: list[int]) -> Any:
        return read(self.model, torch.tensor([text]), self.empty())[0]

    def empty(self) -> kvlayers.DynamicCache:
        return kvlayers.DynamicCache(config=self.model.config)

    @torch.no_grad()
    def expected(self, text: list[int]) -> Tensor:
        return self.model(torch.tensor([text]), use_cache=False).logits[0, -1]

    def step(self, token: int) -> None:
        """Decode one token in each row, and compare."""
        new = torch.tensor([[token + row] for row in range(len(self.rows))])
        logits = row_logits(self.model, self.cache, new)[:, -1]
        self.rows = [[*text, int(own)] for text, own in zip(self.rows, new, strict=True)]
        for text, own in zip(self.rows, logits, strict=True):
            torch.testing.assert_close(own, self.expected(text), rtol=1e-3, atol=2e-3)

    def room(self) -> bool:
        return max(map(len, self.rows)) < MOST

    @precondition(lambda self: self.room())
    @rule(token=st.integers(3, 50))
    def decode(self, token: int) -> None:
        self.step(token)

    @rule(text=texts)
    def begin_another(self, text: list[int]) -> None:
        self.other = self.read(text), text

    @precondition(lambda self: len(self.rows) < 4)
    @rule(how=st.sampled_from(["merge", "extend"]))
    def join(self, how: str) -> None:
        if how == "merge":
            parts = [self.cache.extract(row) for row in range(len(self.rows))]
            self.cache = kvlayers.merge([*parts, self.other[0]])
        else:
            self.cache.extend(self.other[0])
        self.rows = [*self.rows, self.other[1]]

    @rule(row=st.integers(0, 3))
    def extract(self, row: int) -> None:
        row %= len(self.rows)
        self.other = self.cache.extract(row), self.rows[row]

    @rule(data=st.data())
    def keep_rows(self, data: st.DataObject) -> None:
        indices = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3))
        select = self.cache.reorder_cache if len(indices) == len(self.rows) else self.cache.keep_rows
        select(torch.tensor(indices))
        self.rows = [self.rows[index] for index in indices]

    @precondition(lambda self: len(self.rows) == 1)
    @rule(length=st.integers(1, MOST))
    def truncate(self, length: int) -> None:
        (text,) = self.rows
        length = min(length, len(text))
        try:
            self.cache.truncate(length)
        except RollbackError:
            return
        seen = self.cache.get_seq_length()
        assert seen <= length
        self.rows = [text[:seen]]
        if not seen:
            self.cache, self.rows = self.read([9]), [[9]]

    @rule(way=st.sampled_from(["fork", "pickle", "deepcopy", "state"]))
    def copied(self, way: str) -> None:
        if way == "state" and len(self.rows) == 1:
            # A row that was one of several is saved by itself.
            state, self.cache = self.cache.extract(0).state(), self.empty()
            self.cache.load_state(state)
        elif way == "pickle":
            self.cache = pickle.loads(pickle.dumps(self.cache))
        elif way == "deepcopy":
            self.cache = copy.deepcopy(self.cache)
        else:
            self.cache = self.cache.fork()

    @precondition(lambda self: self.room())
    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        """A pass ends in one of the model's modules; it is made again, or refused by name."""
        modules = [module for module in self.model.modules() if not list(module.children())]
        module = data.draw(st.sampled_from(range(len(modules))))
        kept, rows = self.cache.fork(), self.rows

        def stop(*_: Any) -> None:
            raise Interrupted

        with modules[module].register_forward_pre_hook(stop), contextlib.suppress(Interrupted):
            self.step(30)
        if self.rows is not rows:
            return
        try:
            if self.cache.get_seq_length() == max(map(len, rows)):
                self.step(30)
            else:
                # The pass has reached all layers, or the next one is refused.
                self.rows = [[*text, 30 + row] for row, text in enumerate(rows)]
                self.step(31)
        except InterruptedPassError:
            self.cache, self.rows = kept, rows

    @precondition(lambda self: len(self.rows) == 1)
    @rule(pin=st.booleans())
    def insert(self, pin: bool) -> None:
        (text,) = self.rows
        try:
            self.store.insert(torch.tensor(text), self.cache, model="m")
            if pin and len(self.pins) < 2:
                self.store.pin(torch.tensor(text), model="m")
                self.pins.append(text)
        except (kvlayers.CapacityError, kvlayers.errors.StateMismatchError):
            # A moved cache has no states of its text, and pins may leave no room.
            return

    @rule(text=texts, data=st.data())
    def look_up(self, text: list[int], data: st.DataObject) -> None:
        begin = data.draw(st.sampled_from([self.rows[0], self.other[1], *self.pins]))
        prompt = [*begin, *text]
        hit = self.store.lookup(torch.tensor(prompt), model="m")
        if hit.cache is not None:
            self.cache, self.rows = hit.cache, [prompt[: hit.covered]]
            self.step(40)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.store.unpin(torch.tensor(self.pins.pop()), model="m")

    @rule()
    def evict(self) -> None:
        self.store.evict()
        for text in self.pins:
            assert self.store.lookup(torch.tensor([*text, 3]), model="m").covered >= len(text)

    @rule(text=texts, way=st.sampled_from(["generate", "many", "documents"]))
    def call(self, text: list[int], way: str) -> None:
        """A whole call with the store: of several texts at once, of documents, or of one text."""
        prompt = [*self.other[1], *text]
        how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        ids = torch.tensor([prompt])
        wanted = self.model.generate(ids, **how)[0, ids.shape[1] :].tolist()
        if way == "many":
            answers = kvlayers.generate_many(self.model, [prompt, text], prefix_store=self.store, progress=False, **how)
            got = next(iter(answers)).ids.tolist()
        elif way == "documents" and self.attends_fully:
            parts = {"documents": [torch.tensor([self.other[1]])], "question": torch.tensor([text])}
            out = kvlayers.generate(self.model, **parts, recompute="100%", prefix_store=self.store, **how)
            got = out[0, -len(wanted) :].tolist()
        else:
            got = kvlayers.generate(self.model, ids, prefix_store=self.store, **how)[0, ids.shape[1] :].tolist()
        assert got == wanted

    @rule(said=st.text("ab .", min_size=1, max_size=5), before=st.sampled_from(["", "edit", "take back", "alone"]))
    def talk(self, said: str, before: str) -> None:
        """A turn of a chat, whose newest turn may be edited or taken back, or which leaves the store."""
        messages = self.chat.messages if len(self.chat.messages) < 5 else []
        if before == "edit" and messages:
            messages[-1]["content"] = said
        elif before == "take back":
            del messages[-2:]
        if before == "alone" or not messages:
            store = None if before == "alone" else self.store
            self.chat = kvlayers.Chat(self.model, TOKENIZER, messages=messages, prefix_store=store)
        asked = [*map(dict, self.chat.messages), {"role": "user", "content": said}]
        wanted = answer_without_cache(self.model, TOKENIZER, asked, 3)
        assert self.chat.ask(said, **greedy(3)) == wanted

    @rule(number=st.integers(0, 3))
    def another_call_sees_an_image(self, number: int) -> None:
        how: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
        model, asked = seeing_model("qwen2_5_vl"), inputs("qwen2_5_vl", [[5, 6], (number, (4, 4)), [7]])
        wanted = model.generate(**asked, **how)
        assert torch.equal(kvlayers.generate(model, **asked, prefix_store=self.store, **how), wanted)

    @precondition(lambda self: len(self.rows) == 1 and self.attends_fully and len(self.rows[0]) > 3)
    @rule(new=texts, start=st.integers(0, 2))
    def replace(self, new: list[int], start: int) -> None:
        (text,) = self.rows
        # A row that was one of several is a cache by itself from here on.
        self.cache = self.cache.extract(0)
        self.cache.known_ids = torch.tensor([text])
        kvlayers.replace_tokens(self.cache, start, start + 1, torch.tensor([new]), self.model)
        self.rows = [[*text[:start], *new, *text[start + 1 :]]]

    @precondition(lambda self: len(self.rows) == 1)
    @rule(to=st.integers(1, 9))
    def move(self, to: int) -> None:
        """What was moved is no prompt of a store."""
        try:
            moved = kvlayers.moved(self.cache, to, self.model)
        except (UnsupportedLayerError, KVLayersError):
            return
        assert moved.first_position == to
        with pytest.raises(KVLayersError):
            self.store.insert(torch.tensor(self.rows[0]), moved, model="moved")


TestSchedules = Schedules.TestCase
