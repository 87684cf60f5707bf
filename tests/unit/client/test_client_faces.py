"""Client and AsyncClient: two ways to wait for the same calls."""

from __future__ import annotations

import inspect

import carousel
from carousel import AsyncClient, Client
from tests.harness.cases import for_each

BOTH = sorted(set(dir(Client)) & set(dir(AsyncClient)))
CALLS = [name for name in BOTH if not name.startswith("_")]


def test_all_that_asks_the_ring_can_be_asked_either_way() -> None:
    own = {"close", "is_connected", "error", "num_in_flight", "max_in_flight", "labels", "connect"}
    own |= {"aclose", "of_tenant", "open", "submit"}
    assert {name for name in {*dir(Client), *dir(AsyncClient)} if name[0] != "_"} == own | set(CALLS)


@for_each("name", CALLS)
def test_each_call_has_words_and_one_set_of_arguments(name: str) -> None:
    here, there = getattr(Client, name), getattr(AsyncClient, name)
    assert inspect.getdoc(here)
    assert inspect.getdoc(there)
    assert list(inspect.signature(here).parameters) == list(inspect.signature(there).parameters)


def test_help_says_what_each_public_name_is() -> None:
    """Its own words: help() shows those of a base class where there are none."""
    assert not [name for name in carousel.__all__ if not getattr(carousel, name).__doc__]


def test_each_public_name_is_listed_once() -> None:
    _ = carousel.Client
    assert len(set(dir(carousel))) == len(dir(carousel))
