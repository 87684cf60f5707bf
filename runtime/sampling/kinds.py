"""Kinds of sampling parameters: which values are valid, and how the type is written in code and
documentation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.base.errors import InvalidRequest

MAX_STOP_CHARS = 256
"""Maximum number of characters of a stop string or a bad word."""
MAX_WORD_IDS = 64
"""Maximum number of token ids of a stop word or a bad word."""
MAX_TOKEN_ID = (1 << 31) - 1


def power(number: int, base: str = "2^") -> str:
    """Return a large power of two written as a power."""
    return f"{base}{number.bit_length() - 1}" if number >= 1 << 16 else str(number)


def _shown(number: float) -> str:
    """Return a wrong number as text, also an integer of so many digits that Python refuses to print it."""
    if isinstance(number, int) and number.bit_length() > 1024:
        return f"an integer of {number.bit_length()} bits"
    return str(number)


def as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """Return a sequence as a tuple, and None as an empty tuple. Raises InvalidRequest for anything else."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidRequest(f"{name} must be a sequence, got {type(value).__name__}", param=name)
    return tuple(value)


def _token_id(name: str, key: Any) -> Any:
    """Return a mapping's key as a token id. JSON has no integer keys."""
    if not isinstance(key, str):
        return key
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidRequest(f"{name}: {key!r:.40} is not a token id", param=name)
    return int(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(ABC):
    """Type of a parameter with its bounds. `callers` is the type that a caller may write, `packed` the type
    on the wire and `json` the type in a body, each as Python source.
    """

    @property
    @abstractmethod
    def callers(self) -> str: ...

    @property
    @abstractmethod
    def packed(self) -> str: ...

    @property
    def json(self) -> str:
        return self.packed

    @property
    @abstractmethod
    def described(self) -> str:
        """Return a description of the kind for the documentation."""

    def accept(self, name: str, value: Any) -> Any:
        """Convert a caller's value to its form on the wire. Raises InvalidRequest."""
        return value

    @abstractmethod
    def check(self, name: str, value: Any) -> None:
        """Check a value against the bounds. Raises InvalidRequest, which names the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdKind(Kind):
    """A kind whose values contain token ids."""

    @abstractmethod
    def token_ids(self, value: Any) -> Iterable[int]:
        """Return the ids that must be in the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer(Kind):
    low: int
    high: int

    @property
    def callers(self) -> str:
        return "int"

    @property
    def packed(self) -> str:
        return f"Annotated[int, Meta(ge={self.low}, le={power(self.high, '1 << ')})]"

    @property
    def described(self) -> str:
        return f"integer, {self.low} to {power(self.high)}"

    def check(self, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(f"{name} must be an integer, got {type(value).__name__}", param=name)
        if not self.low <= value <= self.high:
            raise InvalidRequest(
                f"{name} must be between {self.low} and {self.high}, got {_shown(value)}", param=name
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed(Integer):
    """An integer of 64 bits, signed or not; on the wire its remainder modulo 2**63."""

    @property
    def packed(self) -> str:
        return "Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]"

    @property
    def json(self) -> str:
        return "Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]"

    @property
    def described(self) -> str:
        return "integer of 64 bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Kind):
    """A float. On the wire it has no bounds, so that an invalid value gets a proper error."""

    low: float
    high: float
    above: bool = False
    """True if `low` itself is not allowed."""

    @property
    def callers(self) -> str:
        return "float"

    @property
    def packed(self) -> str:
        return "float"

    @property
    def json(self) -> str:
        return f"Annotated[float, Meta({'gt' if self.above else 'ge'}={self.low}, le={self.high})]"

    @property
    def described(self) -> str:
        return f"number, {'above ' if self.above else ''}{self.low:g} to {self.high:g}"

    def accept(self, name: str, value: Any) -> Any:
        return float(value) if isinstance(value, float) else value  # NumPy's float64 is one, too

    def check(self, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{name} must be a number, got {type(value).__name__}", param=name)
        # Written so that NaN is outside, too.
        if not self.low <= value <= self.high or (self.above and value == self.low):
            bounds = (
                f"above {self.low} and at most {self.high}"
                if self.above
                else f"between {self.low} and {self.high}"
            )
            raise InvalidRequest(f"{name} must be {bounds}, got {_shown(value)}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(Kind):
    @property
    def callers(self) -> str:
        return "bool"

    @property
    def packed(self) -> str:
        return "bool"

    @property
    def described(self) -> str:
        return "true or false"

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} must be true or false", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping(Kind):
    """Rule for when a beam search stops: 0 or false, 1 or true, 2 for any other number and "never"."""

    @property
    def callers(self) -> str:
        return "bool | int | str"

    @property
    def packed(self) -> str:
        return "Annotated[int, Meta(ge=0, le=2)]"

    @property
    def json(self) -> str:
        return "bool | int | float | str"

    @property
    def described(self) -> str:
        return 'true, false, an integer or "never"'

    def accept(self, name: str, value: Any) -> Any:
        if value == "never":
            return 2
        if not isinstance(value, int) or isinstance(value, bool):
            return int(value) if isinstance(value, bool) else value
        return value if value in (0, 1) else 2

    def check(self, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2:
            raise InvalidRequest(f"{name} must be {self.described}, got {value!r:.40}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts(Kind):
    """A list of numbers that are not token ids."""

    high: int
    max_length: int

    @property
    def callers(self) -> str:
        return "Ids"

    @property
    def packed(self) -> str:
        return f"Annotated[tuple[Annotated[int, Meta(ge=1, le={self.high})], ...], {self._length}]"

    @property
    def json(self) -> str:
        return f"Annotated[list[Annotated[int, Meta(ge=1, le={self.high})]], {self._length}]"

    @property
    def described(self) -> str:
        return f"at most {self.max_length} integers, 1 to {self.high}"

    @property
    def _length(self) -> str:
        return f"Meta(max_length={self.max_length})"

    def accept(self, name: str, value: Any) -> Any:
        return as_tuple(name, value)

    def check(self, name: str, value: Any) -> None:
        each = Integer(low=1, high=self.high)
        if len(value) > self.max_length:
            raise InvalidRequest(f"{name} must be {self.described}, got {len(value)}", param=name)
        for number in value:
            each.check(name, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsKind(Kind):
    max_length: int

    @property
    def callers(self) -> str:
        return "Texts"

    @property
    def packed(self) -> str:
        return f"Annotated[tuple[StopText, ...], Meta(max_length={self.max_length})]"

    @property
    def json(self) -> str:
        return f"Annotated[list[StopText], Meta(max_length={self.max_length})]"

    @property
    def described(self) -> str:
        return f"at most {self.max_length} strings of 1 to {MAX_STOP_CHARS} characters"

    def accept(self, name: str, value: Any) -> Any:
        return (value,) if isinstance(value, str) else as_tuple(name, value)

    def check(self, name: str, value: Any) -> None:
        if len(value) > self.max_length:
            raise InvalidRequest(f"{name}: at most {self.max_length} strings, got {len(value)}", param=name)
        for text in value:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"{name}: each must be a string of 1 to {MAX_STOP_CHARS} characters", param=name
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOrTexts(TextsKind):
    """Several texts; a body may also have a single one."""

    @property
    def json(self) -> str:
        return f"StopText | {TextsKind.json.fget(self)}"  # type: ignore[attr-defined]


_ID = Integer(low=0, high=MAX_TOKEN_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdsKind(IdKind):
    max_length: int
    json_min_length: int = 0
    """Fewest ids in a body, if an empty list is an error."""

    @property
    def callers(self) -> str:
        return "Ids"

    @property
    def packed(self) -> str:
        return f"Annotated[tuple[TokenId, ...], Meta(max_length={self.max_length})]"

    @property
    def json(self) -> str:
        low = f"min_length={self.json_min_length}, " if self.json_min_length else ""
        return f"Annotated[list[TokenId], Meta({low}max_length={self.max_length})]"

    @property
    def described(self) -> str:
        return f"at most {self.max_length} token ids"

    def accept(self, name: str, value: Any) -> Any:
        return as_tuple(name, value)

    def check(self, name: str, value: Any) -> None:
        if len(value) > self.max_length:
            raise InvalidRequest(f"{name}: at most {self.max_length} token ids, got {len(value)}", param=name)
        for token in value:
            _ID.check(name, token)

    def token_ids(self, value: Collection[int]) -> Iterable[int]:
        return value


_WORD = IdsKind(max_length=MAX_WORD_IDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordsKind(IdKind):
    """A list of words, each a sequence of token ids."""

    max_length: int

    @property
    def callers(self) -> str:
        return "Words"

    @property
    def packed(self) -> str:
        return f"Annotated[tuple[WordIds, ...], Meta(max_length={self.max_length})]"

    @property
    def json(self) -> str:
        return f"Annotated[list[WordIds], Meta(max_length={self.max_length})]"

    @property
    def described(self) -> str:
        return f"at most {self.max_length} lists of 1 to {MAX_WORD_IDS} token ids"

    def accept(self, name: str, value: Any) -> Any:
        return tuple([as_tuple(name, word) for word in as_tuple(name, value)])

    def check(self, name: str, value: Any) -> None:
        if len(value) > self.max_length:
            raise InvalidRequest(f"{name}: at most {self.max_length} words, got {len(value)}", param=name)
        for word in value:
            if not word:
                raise InvalidRequest(f"{name}: a word needs at least one token id", param=name)
            _WORD.check(name, word)

    def token_ids(self, value: Collection[Collection[int]]) -> Iterable[int]:
        return [token for word in value for token in word]


@dataclass(frozen=True, slots=True, kw_only=True)
class Biases(IdKind):
    """Pairs of token id and bias; in JSON an object by token id."""

    max_length: int
    bias: Number

    @property
    def callers(self) -> str:
        return "Bias"

    @property
    def packed(self) -> str:
        return f"Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length={self.max_length})]"

    @property
    def json(self) -> str:
        return f"Annotated[dict[str, BiasValue], Meta(max_length={self.max_length})]"

    @property
    def described(self) -> str:
        return f"at most {self.max_length} token ids with a bias of {self.bias.low:g} to {self.bias.high:g}"

    def accept(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            value = [(_token_id(name, token), bias) for token, bias in value.items()]
        pairs = as_tuple(name, value)
        if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
            raise InvalidRequest(f"{name} must be a mapping, or pairs of token id and bias", param=name)
        return tuple([(token, self.bias.accept(name, bias)) for token, bias in pairs])

    def check(self, name: str, value: Any) -> None:
        if len(value) > self.max_length:
            raise InvalidRequest(f"{name}: at most {self.max_length} entries", param=name)
        seen: set[int] = set()
        for token, bias in value:
            _ID.check(name, token)
            self.bias.check(name, bias)
            if token in seen:
                raise InvalidRequest(f"{name}: token id {token} is given twice", param=name)
            seen.add(token)

    def token_ids(self, value: Collection[tuple[int, float]]) -> Iterable[int]:
        return [token for token, _ in value]
