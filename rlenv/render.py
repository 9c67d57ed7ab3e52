"""Messages go in, exact token ids come out: a row that only ever grows, whose sampled ids are never re-tokenised.

A row is `start(messages)`, then per turn the ids that the engine sampled and the ids that `extend` adds. The
prompt of turn n + 1 therefore always begins with the prompt of turn n and the ids sampled on it, whatever the
chat template would make of the same messages: a template that strips the thinking of earlier turns (Qwen3's)
is not applied to them again, so that the context trained on is the context sampled from.

The template's own pieces become control tokens; the contents of messages never do. A `<|im_end|>` that an
environment prints stays ten characters of text.
"""

from __future__ import annotations

import copy
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlenv.errors import ConfigError
from rlenv.types import Completion, Message

# For tokenizers without a chat template, such as those of base models: one line a message, "User: ...", and the
# end token after an assistant's.
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_QUESTION: Message = {"role": "user", "content": "?"}


class Renderer:
    """Renders chats with one tokenizer's template, token-in and token-out. Safe from several threads at once.

    >>> row = renderer.start([{"role": "user", "content": "2+2?"}])
    >>> completion = engine.generate_sync(row, Sample())
    >>> row = renderer.extend(row, completion, [{"role": "user", "content": "Sure?"}])

    Raises ConfigError for a template that needs more than messages, or drops an assistant's content.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = None if tokenizer.chat_template else PLAIN_TEMPLATE
        self._control = _ControlTokens(tokenizer)
        self._encode = _literal_encoder(tokenizer, self._control)
        self._closing = self._after_answer([], prompt=False)  # what ends an assistant's turn
        ends = [id for id in (*self._closing[:1], tokenizer.eos_token_id) if id in self._control.ids.values()]
        if not ends:
            raise ConfigError(f"nothing ends an answer of {_name(tokenizer)}: set tokenizer.eos_token")
        self.end_id = ends[0]  # the one that closes a turn in the chat template
        self.stop_ids = frozenset(ends)  # each of these ends a turn

    def start(self, messages: Sequence[Message]) -> list[int]:
        """The ids [P] of a chat which the policy is to continue: `apply_chat_template`'s, for ordinary text."""
        hidden = _Hidden(messages, self._control)
        return self._ids(self._apply(hidden.messages, prompt=True), hidden, opens=True)

    def extend(self, ids: Sequence[int], completion: Completion | str, messages: Sequence[Message]) -> list[int]:
        """The row `ids` [P] with this turn's answer, its closing tokens, new messages and the next turn's opening.

        Closing tokens that were sampled stand once; those that were not (an answer cut by a limit, the newline
        after the end token) are added. An answer given as text is one that nobody sampled: it is tokenised.
        """
        answer = self.answer_ids(completion)
        after = self._after_answer(messages, prompt=True)
        return [*ids, *answer, *after[self._closed(answer, after) :]]

    def answer_ids(self, completion: Completion | str) -> list[int]:
        """The ids [T] that an answer adds to the row: those sampled, or those of a text that nobody sampled."""
        if isinstance(completion, str):
            return self._encode(completion, opens=False)
        return list(completion.token_ids)

    def text(self, token_ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """What sampled ids say: `text_of` with this tokenizer."""
        return text_of(self._tokenizer, token_ids, stop)

    def _closed(self, answer: list[int], after: list[int]) -> int:
        """How many of the turn's closing tokens, which `after` begins with, the answer itself ends with."""
        shared = next((i for i, pair in enumerate(zip(self._closing, after, strict=False)) if len({*pair}) > 1), None)
        longest = len(self._closing) if shared is None else shared
        sizes = range(min(longest, len(answer), len(after)), 0, -1)
        return next((size for size in sizes if answer[-size:] == after[:size]), 0)

    def _after_answer(self, messages: Sequence[Message], *, prompt: bool) -> list[int]:
        """The ids that the template writes after an assistant's answer, when these messages follow it."""
        hidden = _Hidden(messages, self._control)
        answer: Message = {"role": "assistant", "content": hidden.answer}
        chat = self._apply([_QUESTION, answer, *hidden.messages], prompt=prompt)
        _, found, after = chat.partition(hidden.answer)
        if not found or hidden.answer in after:
            raise ConfigError(
                f"the chat template of {_name(self._tokenizer)} does not write an assistant's content exactly once: "
                "set tokenizer.chat_template to one that does"
            )
        return self._ids(after, hidden, opens=False)

    def _apply(self, messages: Sequence[Message], *, prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), chat_template=self._template, add_generation_prompt=prompt, tokenize=False
            )
        except Exception as error:  # a template may raise whatever it likes
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template of {_name(self._tokenizer)} refuses {roles}: {error}") from error

    def _ids(self, text: str, hidden: _Hidden, *, opens: bool) -> list[int]:
        """The ids of rendered text: its control tokens by id, the runs between them as literal text."""
        ids: list[int] = []
        begin = 0
        for match in self._control.cut.finditer(text):
            ids += self._encode(hidden.show(text[begin : match.start()]), opens=opens and not ids)
            ids.append(self._control.ids[match[match.lastindex or 0]])
            begin = match.end()
        return ids + self._encode(hidden.show(text[begin:]), opens=opens and not ids)


def text_of(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """What sampled ids say, special tokens dropped, up to and including the first of the `stop` strings.

    All ids are decoded at once, so that a character split over several tokens comes out whole; one that a limit
    cut ends in U+FFFD. The ids of a stop string that ends inside a token say more than the text does.
    """
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    ends = [text.find(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else text


class _ControlTokens:
    """A tokenizer's special tokens: their ids, where they stand in a rendered chat, where their text occurs."""

    def __init__(self, tokenizer: Any) -> None:
        added = [(token, id) for id, token in tokenizer.added_tokens_decoder.items() if token.special and token.content]
        added.sort(key=lambda pair: -len(pair[0].content))
        self.ids: dict[str, int] = {token.content: id for token, id in added}
        self.names = tuple(self.ids)
        space = (r"", r"\s*")  # some tokens swallow the space beside them
        spaced = [f"{space[t.lstrip]}({re.escape(t.content)}){space[t.rstrip]}" for t, _ in added]
        self.cut = re.compile("|".join(spaced) or r"(?!)")
        self.text = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")


class _Hidden:
    """Messages in whose contents the text of control tokens is hidden from the template, until `show`."""

    def __init__(self, messages: Sequence[Message], control: _ControlTokens) -> None:
        contents = "".join(message["content"] for message in messages)
        self._mark = next(mark for mark in map(chr, range(0xF0000, 0xFFFFE)) if mark not in contents)
        self._names = control.names
        self.answer = f"{self._mark}answer{self._mark}"
        self.messages: list[Message] = [
            {**message, "content": control.text.sub(self._hide, message["content"])} for message in messages
        ]

    def show(self, run: str) -> str:
        return re.sub(f"{self._mark}([0-9]+){self._mark}", lambda match: self._names[int(match[1])], run)

    def _hide(self, match: re.Match[str]) -> str:
        return f"{self._mark}{self._names.index(match.group())}{self._mark}"


class Encode(Protocol):
    """Text to ids with special tokens read as text. What `opens` a row may get a space put before it."""

    def __call__(self, text: str, *, opens: bool) -> list[int]: ...


_ANCHOR = "\ue0ff\ue0fe\ue0ff"  # one token, behind which text is encoded as it is in the middle of a row
_encoders: weakref.WeakKeyDictionary[Any, tuple[int, Encode]] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _literal_encoder(tokenizer: Any, control: _ControlTokens) -> Encode:
    """The tokenizer's `Encode`, made once for all renderers: to copy a large vocabulary takes a second."""
    with _making:
        size, encode = _encoders.get(tokenizer, (None, None))
        if encode is None or size != len(tokenizer):
            encode = _made_encoder(tokenizer, control)
            _encoders[tokenizer] = len(tokenizer), encode
    return encode


def _made_encoder(tokenizer: Any, control: _ControlTokens) -> Encode:
    plain = _literal(tokenizer)
    behind = [tokenizer.encode(name + "a", add_special_tokens=False)[1:] for name in control.names[:1]]
    if behind == [plain("a")]:
        return lambda text, *, opens: plain(text)
    anchored = _literal(tokenizer, _ANCHOR)

    def encode(text: str, *, opens: bool) -> list[int]:
        if opens or not text or _ANCHOR in text:
            return plain(text)
        return anchored(_ANCHOR + text)[1:]

    return encode


def _literal(tokenizer: Any, *added: str) -> Callable[[str], list[int]]:
    """The tokenizer's own encoding, on a copy whose settings nobody else changes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        slow = copy.deepcopy(tokenizer)
        slow.add_tokens(list(added))
        return lambda text: list(slow.encode(text, add_special_tokens=False, split_special_tokens=True))
    fast = copy.deepcopy(backend)
    fast.encode_special_tokens = True
    fast.no_padding()
    fast.no_truncation()
    fast.add_tokens(list(added))
    return lambda text: list(fast.encode(text, add_special_tokens=False).ids)


def _name(tokenizer: Any) -> str:
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
