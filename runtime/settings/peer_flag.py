"""PeerFlag: a flag of another server's command line, and how each of its values is treated here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from runtime.base.errors import ConfigError

NOTHING: Mapping[str, Any] = {}


class Meaning(NamedTuple):
    """Settings that a flag of another server stands for; if there are none, the reason why
    nothing changes.
    """

    settings: Mapping[str, Any]
    note: str


class PeerFlag(NamedTuple):
    """A row of the table. For a value, `understood` is checked first, then `taken`, then `refused`."""

    names: tuple[str, ...]
    has_value: bool
    understood: Mapping[str, Mapping[str, Any]] = {}
    """Settings by value. A switch has the values true and false."""
    taken: str = ""
    """Reason why an accepted value changes nothing."""
    neutral: tuple[str, ...] = ()
    """Values that are accepted because they ask for nothing; if empty, all values are accepted."""
    refused: str = ""
    """Advice for a refused value: the spelling here, or why it is not supported."""
    read: Callable[[str, str], Mapping[str, Any] | None] = lambda option, value: None
    """Function from the option and a value with several parts to the settings that it stands for; None: the
    value is refused.
    """

    def meaning(self, option: str, value: str) -> Meaning:
        """Return the settings that this value stands for. Raises ConfigError, which says what to
        use instead.
        """
        if not self.has_value and not is_on(option, value):
            return Meaning(NOTHING, self.taken or "off is what it is anyway")
        settings = self.understood.get(value if self.has_value else "true")
        settings = self.read(option, value) if settings is None else settings
        if settings is not None:
            return Meaning(settings, "")
        if self.taken and (not self.neutral or value in self.neutral):
            return Meaning(NOTHING, self.taken)
        given = f"{option} {value}" if self.understood or self.neutral else option
        raise ConfigError(f"{given}: {self.refused}")


def is_on(option: str, value: str) -> bool:
    """Return True if this value switches a switch on. Raises ConfigError for an invalid value."""
    if value.lower() in ("true", "1", "yes"):
        return True
    if value.lower() in ("false", "0", "no"):
        return False
    raise ConfigError(f"{option}: expected nothing, true or false, got {value!r}")


def understood(*names: str, **settings: Any) -> PeerFlag:
    """Make the row of a switch that stands for settings of ours."""
    return PeerFlag(names, has_value=False, understood={"true": settings})


def chosen(*names: str, refused: str = "", taken: str = "", **values: Any) -> PeerFlag:
    """Make the row of a flag whose values stand for settings of ours. values: settings by value, or None
    where nothing changes, for which `taken` gives the reason.
    """
    settings = {value: given for value, given in values.items() if given is not None}
    neutral = tuple(value for value, given in values.items() if given is None)
    return PeerFlag(names, has_value=True, understood=settings, taken=taken, neutral=neutral, refused=refused)


def switch(*names: str, taken: str) -> PeerFlag:
    """Make the row of a switch that changes nothing."""
    return PeerFlag(names, has_value=False, taken=taken)


def value(*names: str, taken: str, neutral: tuple[str, ...] = (), refused: str = "") -> PeerFlag:
    """Make the row of a flag with a value that changes nothing, or that accepts only the `neutral` values."""
    return PeerFlag(names, has_value=True, taken=taken, neutral=neutral, refused=refused)


def no_switch(*names: str, refused: str) -> PeerFlag:
    """Make the row of a switch for something that is not supported. Switching it off is accepted."""
    return PeerFlag(names, has_value=False, refused=refused)


def no_value(*names: str, refused: str) -> PeerFlag:
    """Make the row of a flag with a value for something that is not supported."""
    return PeerFlag(names, has_value=True, refused=refused)
