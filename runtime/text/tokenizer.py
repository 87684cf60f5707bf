"""Tokenizer: converts between text, ids and conversations as the files beside a checkpoint say.

Together with runtime.text.chat_template it has the only import of transformers outside the model worker, and
keeps torch out of it: the class that reads tokenizer.json does not need torch, while AutoTokenizer would
import it. Knows no request and no message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tokenizers import Tokenizer as Backend

from runtime.base.errors import ModelError
from runtime.text.encode_in_parts import TextInParts, has_short_rules, last_ids, may_cut_words
from runtime.text.plain_encoder import PlainEncoder
from runtime.text.special_text import Shield, ShieldedText
from runtime.text.spelling import ByteLevelSpelling, spelling_of
from runtime.text.token_lengths import max_token_chars
from runtime.text.word_cache import filling_texts
from runtime.wire.format import IntArray

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

    from runtime.text.chat_template import ChatTemplate

PIECE_IDS = 1 << 16
MAX_WHOLE_CHARS = 1 << 16
"""Maximum number of characters of a text that is encoded in one piece, if it can be in parts."""
MIN_PARALLEL_CHARS = 1 << 10
"""Number of characters of a batch, 0.2 ms of work, from which the library's threads share it. Waking a
thread takes 15 us.
"""

# Imported when it is needed: transformers and its imports take half a second.


class _ProcessorTemplate(msgspec.Struct):
    chat_template: str


class Tokenizer:
    """A checkpoint's tokenizer. Several threads may encode at a time, and other threads run meanwhile."""

    def __init__(
        self,
        backend: Backend,
        open_wrapper: Callable[[], PreTrainedTokenizerFast],
        *,
        is_wrapper_open: bool = True,
        allow_special_tokens: bool = False,
    ) -> None:
        """open_wrapper: called for the first conversation. is_wrapper_open: True if that needs no further
        reading or import. allow_special_tokens: True if special tokens in callers' input to the chat template
        are tokens, too.
        """
        # A file may ask for padding or truncation, left over from training; both would change prompts
        # silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._open_wrapper = open_wrapper
        self._is_wrapper_open = is_wrapper_open
        self._allow_special_tokens = allow_special_tokens
        added = backend.get_added_tokens_decoder()
        self.vocabulary: dict[int, str] = {
            token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()
        }
        """Every id that the tokenizer knows, with the token as the vocabulary spells it."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that `skip_special_tokens` leaves out of text."""
        self._spelling = spelling_of(backend.decoder)
        self.is_byte_level = isinstance(self._spelling, ByteLevelSpelling)
        """True if every token stands for fixed bytes, whatever its neighbours."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: one more than the highest id. A model may have more rows than that, as
        padding.
        """
        return max(self.vocabulary) + 1

    def fill_word_cache(self) -> None:
        """Fill the library's cache of words, so that times tell nobody what others have sent."""
        with _panics_as_errors():
            for text in filling_texts(self.vocabulary.values()):
                self._backend.encode(text, add_special_tokens=False)

    @property
    def is_template_open(self) -> bool:
        """True if a conversation takes no longer than its text. If False, the first conversation imports
        transformers and reads the template, in one thread.
        """
        return self._is_wrapper_open or "_chat_template" in self.__dict__

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        from runtime.text.chat_template import ChatTemplate

        return ChatTemplate(self._open_wrapper(), None if self._allow_special_tokens else self._make_shield())

    def _make_shield(self) -> Shield:
        special = [token for token in self._backend.get_added_tokens_decoder().values() if token.special]
        normalizer = self._backend.normalizer
        return Shield(
            [token.content for token in special],
            [token.content for token in special if token.normalized],
            None if normalizer is None else normalizer.normalize_str,
        )

    @cached_property
    def _plain_encoder(self) -> PlainEncoder:
        """Encoder for texts in which callers have spelled special tokens, which are few."""
        return PlainEncoder(self._backend)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template.exists

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
        """Return the ids of each text, int32, in order. Raises InvalidRequest for the prompt of a
        conversation with a special token that cannot be encoded as characters.
        """
        if not any(map(self._is_long, texts)):
            return self._encode_whole(texts, add_special_tokens)
        return [
            self._encode_in_parts(text, add_special_tokens)[0]
            if self._is_long(text)
            else self._encode_whole([text], add_special_tokens)[0]
            for text in texts
        ]

    def encode_end(
        self, text: str, num_last: int, *, add_special_tokens: bool = True
    ) -> tuple[IntArray, int]:
        """Return the last num_last ids of a text, or all if there are fewer, int32, and the number of all.
        Raises InvalidRequest as encode_batch does.
        """
        if not self._is_long(text):
            ids = self._encode_whole([text], add_special_tokens)[0]
            return last_ids(ids, num_last), len(ids)
        return self._encode_in_parts(text, add_special_tokens, num_last)

    def _encode_in_parts(
        self, text: str, add_special_tokens: bool, num_last: int | None = None
    ) -> tuple[IntArray, int]:
        whole, places = self._ids_of, self._places_of
        if isinstance(text, ShieldedText):
            whole, places = self._plain_encoder.ids_of, self._plain_encoder.places_of
        with _panics_as_errors():
            parts = TextInParts(text, whole, places, may_cut_words=self._may_cut_words)
            last, num_all = parts.ids(num_last)
        if add_special_tokens:
            around = self._with_added_ids(last)
            num_all += len(around) - len(last)
            last = last_ids(around, num_last)
        return last, num_all

    def _ids_of(self, text: str) -> IntArray:
        return _array_of(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _places_of(self, text: str) -> tuple[Encoding, IntArray]:
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        return encoding, _array_of(encoding.ids)

    def _is_long(self, text: str) -> bool:
        return len(text) > MAX_WHOLE_CHARS and self.encodes_in_parts

    @cached_property
    def encodes_in_parts(self) -> bool:
        """True if a long text is encoded in parts, so that this takes little memory beside the text."""
        return has_short_rules(self._backend)

    @cached_property
    def _may_cut_words(self) -> bool:
        return may_cut_words(self._backend)

    def _encode_whole(self, texts: Sequence[str], add_special_tokens: bool) -> list[IntArray]:
        shielded = [text for text in texts if isinstance(text, ShieldedText)]
        with _panics_as_errors():
            if not shielded:
                return self._encode_ordinary(texts, add_special_tokens)
            ordinary = [text for text in texts if not isinstance(text, ShieldedText)]
            ids = iter(self._encode_ordinary(ordinary, add_special_tokens))
            plain = iter(self._plain_encoder.encode_batch(shielded))
            if add_special_tokens:
                plain = map(self._with_added_ids, plain)
        return [next(plain if isinstance(text, ShieldedText) else ids) for text in texts]

    def _encode_ordinary(self, texts: Sequence[str], add_special_tokens: bool) -> list[IntArray]:
        encode = self._backend.encode_batch_fast
        if sum(map(len, texts)) < MIN_PARALLEL_CHARS:
            encodings = [encode([text], add_special_tokens=add_special_tokens)[0] for text in texts]
        else:
            encodings = encode(texts, add_special_tokens=add_special_tokens)
        return [_array_of(encoding.ids) for encoding in encodings]

    def _with_added_ids(self, ids: IntArray) -> IntArray:
        """Return the ids with the special ids that the tokenizer adds around any text."""
        alone, added = (self._backend.encode("a", add_special_tokens=adds).ids for adds in (False, True))
        places = range(len(added) - len(alone) + 1)
        start = next((at for at in places if added[at : at + len(alone)] == alone), len(added))
        around = added[:start], added[start + len(alone) :]
        return np.concatenate([np.array(around[0], np.int32), ids, np.array(around[1], np.int32)])

    @property
    def template_variables(self) -> frozenset[str]:
        """Names of the variables that the chat template reads. The first call loads the template."""
        return self._chat_template.variables

    @property
    def special_texts(self) -> frozenset[str]:
        """Texts of the tokens that `skip_special_tokens` leaves out."""
        return frozenset(self.vocabulary[token_id] for token_id in self.special_ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence. Ids that the tokenizer does not know have no text."""
        with _panics_as_errors():
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return each id's token as the vocabulary spells it; "" for an id that it does not know."""
        return [self.vocabulary.get(token_id, "") for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of text that a token stands for, which may be part of a character. None for an
        unknown id, and where the text depends on the neighbouring tokens.
        """
        token = self.vocabulary.get(token_id)
        return None if token is None else self._spelling.bytes_of(token)

    def max_token_chars(self) -> int | None:
        """Return the most characters of text for one token; None if there is no bound. Walks over the
        vocabulary: call once.
        """
        return max_token_chars(self._backend, self.vocabulary.values())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt of a conversation, special tokens included. Encode it with
        add_special_tokens=False. It is a ShieldedText if callers have spelled special tokens.

        - continue_final_message: the prompt ends with the last message, which the model continues.
        - template_kwargs: further variables of the template. tools: definitions that it shows.

        Raises InvalidRequest, which names messages, tools, continue_final_message or chat_template_kwargs, if
        there is no template or it does not accept these.
        """
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs or {},
            tools=tools,
        )


def _array_of(ids: list[int]) -> IntArray:
    """Return ids as an array. Other threads can run between pieces: a million ids take 15 ms."""
    if len(ids) <= PIECE_IDS:
        return np.array(ids, np.int32)
    starts = range(0, len(ids), PIECE_IDS)
    return np.concatenate([np.array(ids[start : start + PIECE_IDS], np.int32) for start in starts])


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Context manager that turns a panic of the library's Rust code into an error. A panic is not an
    Exception, so it would end the process instead of one request.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError("the tokenizer library panicked") from error
        raise


def load(
    path: Path,
    *,
    chat_template: Path | None = None,
    prepared: Path | None = None,
    allow_special_tokens: bool = False,
) -> Tokenizer:
    """Read the tokenizer in the directory `path`. Raises ModelError when a file is missing or cannot be read.

    - chat_template: file that replaces the chat template.
    - prepared: file in which the first process leaves the tokenizer as transformers has made it. A process
      that replaces a dead one reads this file, faster and without transformers.
    - allow_special_tokens: see Tokenizer.
    """
    if prepared is not None and prepared.exists():
        backend = Backend.from_file(str(prepared))
        return Tokenizer(
            backend,
            lambda: read_wrapper(path, chat_template),
            is_wrapper_open=False,
            allow_special_tokens=allow_special_tokens,
        )
    wrapper = read_wrapper(path, chat_template)
    if prepared is not None:
        _leave(wrapper.backend_tokenizer, prepared)
    return Tokenizer(wrapper.backend_tokenizer, lambda: wrapper, allow_special_tokens=allow_special_tokens)


def _leave(backend: Backend, prepared: Path) -> None:
    """Write the prepared tokenizer. Several processes may do so at the same time."""
    new = prepared.with_suffix(f".{os.getpid()}")
    # Without the file a restart only takes longer. The library raises plain Exception if it cannot write.
    with suppress(Exception):
        backend.save(str(new), pretty=False)
        new.replace(prepared)
    with suppress(OSError):
        new.unlink(missing_ok=True)


def read_wrapper(path: Path, chat_template: Path | None) -> PreTrainedTokenizerFast:
    """Read a tokenizer's files, as transformers has them. Raises ModelError."""
    from transformers import PreTrainedTokenizerFast

    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path} has no tokenizer.json. Convert the model's tokenizer to that format first.")
    try:
        wrapper: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            str(path), local_files_only=True
        )
    except Exception as error:  # the library raises plain Exception for a file that it cannot parse
        raise ModelError(f"The tokenizer in {path} cannot be read: {error}") from error
    if wrapper.chat_template is None and chat_template is None:
        wrapper.chat_template = _template_of_processor(path / "chat_template.json")
    if chat_template is not None:
        try:
            wrapper.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"The chat template {chat_template} cannot be read: {error}") from error
    return wrapper


def _template_of_processor(path: Path) -> str | None:
    """Return the chat template that older multimodal checkpoints have in a processor file; None if there is
    none. Raises ModelError.
    """
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=_ProcessorTemplate).chat_template
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"The chat template {path} cannot be read: {error}") from error
