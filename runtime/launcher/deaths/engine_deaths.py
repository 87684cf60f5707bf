"""DeathCounts: finds out which sequence, or whose, ends the engine, from who was there each time.

A sequence that has come further than where the engine died under it is not to blame for that death. So each
death is laid to fewer and fewer. One that is there at two deaths runs alone for a while, and is guilty if the
engine dies then. Where all that are left of a death belong to one tenant, the tenant gets a strike, since a
caller who sends such a request and leaves shows up only once. A tenant with too many is suspended.

A death is explained, and costs the launch no restart, as long as its culprit is known: a sequence that was
found guilty, a tenant that is suspended, the only sequence that is left of it, or those that are left and
have not come again. One that all have come past may be the machine's.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from runtime.launcher.deaths.restart_budget import Verdict
from runtime.ring.endpoints import Endpoints
from runtime.ring.launch_state import write_atomically
from runtime.ring.suspects.in_hand import request_of
from runtime.ring.suspects.roster import ALWAYS_ALONE, NO_SUSPECTS, OWNER_MARK, Seen, Suspects
from runtime.wire.handle import NO_HANDLE, sequence_key

DEATHS_TO_RUN_ALONE = 2
"""Number of the engine's deaths with a sequence present after which that sequence must run alone."""
DEATHS_TO_STAY_ALONE = 4
"""Number of deaths after which it stays alone until its end: it may be harmless only while it is alone."""
GUILT = 2
"""Strikes for a sequence that is found guilty. From this number on, one death suffices to run alone."""
STRIKES_TO_SUSPEND = 3
STRIKE_S = 600.0
"""Seconds for which a strike counts."""
SUSPENSION_S = 60.0
"""Seconds of a tenant's first suspension. Each further one is twice as long."""
MAX_SUSPENSION_S = 3600.0
MAX_DEATHS = 16
MAX_COUNTED = 65536


@dataclass(slots=True)
class _Death:
    at_s: float
    blamed: dict[bytes, int]
    """Number of tokens up to which each sequence was computed that may be to blame, by key."""
    tenant_of: dict[bytes, bytes]

    def only_tenant(self) -> bytes:
        """Return the mark of the tenant of all that are left; OWNER_MARK if there are several."""
        tenants = {self.tenant_of[key] for key in self.blamed}
        return tenants.pop() if len(tenants) == 1 else OWNER_MARK


class DeathCounts:
    """Deaths that a request may have caused, the newest MAX_DEATHS that nobody was found guilty of."""

    def __init__(self) -> None:
        self._deaths: deque[_Death] = deque(maxlen=MAX_DEATHS)
        self._times: dict[bytes, int] = {}
        """Number of deaths at which each sequence was, of those that it has come past, too."""
        self._guilty: dict[bytes, None] = {}
        self._guilts: list[tuple[float, bytes]] = []
        """Time and tenant of each sequence that was found guilty."""
        self._suspended: dict[bytes, tuple[float, int]] = {}
        """Time until which each tenant is suspended, and how often it was."""
        self._tenants: dict[bytes, None] = {}
        """Marks of all tenants that were seen at deaths."""
        self.verdict = Verdict({}, has_served=False)
        """Judgement of the last death and those before it."""
        self._has_served = False
        """True if something was served since the last death, by processes that no request has ended."""

    def note_end(self, seen: Seen, now_s: float) -> Suspects:
        """Record the end of a process that no request has caused. Returns the suspects that are left."""
        self._clear(seen.past)
        self._has_served = self._has_served or seen.has_served or bool(seen.past)
        return self._suspects(self._strikes(now_s))

    def _clear(self, past: frozenset[bytes]) -> None:
        """Blame no sequence for an earlier death any more that has come past it."""
        for death in self._deaths:
            for key in past & death.blamed.keys():
                del death.blamed[key]

    def count(self, seen: Seen, solitary: bytes, now_s: float) -> Suspects:
        """Count a death. solitary: handle, key or name of the sequence that ran alone, or NO_HANDLE. now_s:
        time of CLOCK_MONOTONIC. Returns the suspects.
        """
        self._clear(seen.past)
        self._tenants |= dict.fromkeys([*seen.present.values(), *seen.left.values()])
        alone = sequence_key(solitary)
        key = next((each for each in (*seen.present, *seen.left) if sequence_key(each) == alone), b"")
        tenant = seen.present.get(key, seen.left.get(key))
        remaining = [death for death in self._deaths if death.blamed and key not in death.blamed]
        explained = {
            death.at_s: tenant is not None and key in death.blamed
            for death in self._deaths
            if not death.blamed or key in death.blamed
        }
        if tenant is not None:
            self._guilty[key] = None
            self._guilts.append((now_s, tenant))
            explained[now_s] = True
        else:
            remaining.append(self._new_death(seen, now_s))
        self._deaths = deque(remaining, MAX_DEATHS)
        strikes = self._strikes(now_s)
        for counted in (self._times, self._guilty, self._tenants):
            while len(counted) > MAX_COUNTED:
                del counted[next(iter(counted))]
        self._suspend(strikes, now_s)
        explained |= {death.at_s: self._is_explained(death, seen, now_s) for death in self._deaths}
        has_served = self._has_served or seen.has_served or bool(seen.past)
        self.verdict = Verdict(explained, has_served=has_served)
        self._has_served = False
        return self._suspects(strikes)

    def _is_explained(self, death: _Death, seen: Seen, now_s: float) -> bool:
        """Return True if the culprit of a death that is laid to somebody is known. An only tenant is no
        culprit: whatever happens is laid to it.
        """
        if len(death.blamed) == 1:
            return True
        until_s, _ = self._suspended.get(death.only_tenant(), (0.0, 0))
        if until_s > now_s and len(self._tenants) > 1:
            return True
        return bool(death.blamed) and death.blamed.keys().isdisjoint(seen.present)

    def _new_death(self, seen: Seen, now_s: float) -> _Death:
        blamed = {**dict.fromkeys(seen.left, 0), **seen.running} or dict.fromkeys(seen.present, 0)
        for key in blamed:
            self._times[key] = self._times.pop(key, 0) + 1
        tenant_of = {**seen.left, **seen.present}
        return _Death(now_s, blamed, {key: tenant_of[key] for key in blamed})

    def _strikes(self, now_s: float) -> dict[bytes, int]:
        """Return each tenant's strikes. One is taken back when a sequence comes past the death after all."""
        strikes: dict[bytes, int] = {}
        self._guilts = [(at_s, mark) for at_s, mark in self._guilts if now_s - at_s < STRIKE_S]
        for _, mark in self._guilts:
            strikes[mark] = strikes.get(mark, 0) + GUILT
        for death in self._deaths:
            if now_s - death.at_s < STRIKE_S:
                mark = death.only_tenant()
                strikes[mark] = strikes.get(mark, 0) + 1
        strikes.pop(OWNER_MARK, None)
        return strikes

    def _suspend(self, strikes: dict[bytes, int], now_s: float) -> None:
        for mark, num_strikes in strikes.items():
            if num_strikes < STRIKES_TO_SUSPEND:
                continue
            until_s, times = self._suspended.get(mark, (0.0, 0))
            if until_s <= now_s:
                seconds = min(MAX_SUSPENSION_S, SUSPENSION_S * 2**times)
                self._suspended[mark] = (now_s + seconds, times + 1)
        for mark, (until_s, _) in list(self._suspended.items()):
            if now_s - until_s > MAX_SUSPENSION_S:
                del self._suspended[mark]

    def _suspects(self, strikes: dict[bytes, int]) -> Suspects:
        num_deaths: dict[bytes, int] = {}
        watched: dict[bytes, int] = {}
        alone: dict[bytes, int] = {}
        for death in self._deaths:
            for key, reached in death.blamed.items():
                num_deaths[key] = num_deaths.get(key, 0) + 1
                watched[key] = max(reached, watched.get(key, 0))
                is_known = strikes.get(death.tenant_of[key], 0) >= GUILT
                if num_deaths[key] >= (1 if is_known else DEATHS_TO_RUN_ALONE):
                    stays = self._times.get(key, 0) >= DEATHS_TO_STAY_ALONE
                    alone[key] = ALWAYS_ALONE if stays else watched[key]
        return Suspects(
            {key: reached for key, reached in alone.items() if key not in self._guilty},
            {key: reached for key, reached in watched.items() if key not in self._guilty},
            frozenset(self._guilty),
            {mark: until_s for mark, (until_s, _) in self._suspended.items()},
        )


class InHandDeaths:
    """DeathCounts of all processes of a role. A request that one has died of may come to another."""

    def __init__(self, endpoints: Endpoints, role: str) -> None:
        self._endpoints = endpoints
        self._role = role
        self._counts = DeathCounts()
        self._suspects = NO_SUSPECTS

    def count(self, index: int, now_s: float) -> Verdict:
        """Count the death of a process, before the next one is started. Raises OSError."""
        found = Seen.read(self._endpoints.in_hand_file(self._role, index))
        seen = _by_request(found)
        # One that is to be alone is in hand alone. Otherwise nothing is known of a single one, except in a
        # detokenizer, which never has more.
        known = self._suspects.watched if self._role == "detokenizer" else self._suspects.alone
        alone = next(iter(seen.present)) if len(seen.present) == 1 else NO_HANDLE
        solitary = alone if alone in known else NO_HANDLE
        self._watch(self._counts.count(seen, solitary, now_s), found.past, found.pieces)
        self._write()
        return self._counts.verdict

    def note_end(self, index: int, now_s: float) -> None:
        """Record the end of a process that no request has caused. Raises OSError."""
        seen = _by_request(Seen.read(self._endpoints.in_hand_file(self._role, index)))
        self._watch(self._counts.note_end(seen, now_s), seen.past)
        if seen.past:
            self._write()

    def _watch(self, suspects: Suspects, past: frozenset[bytes], new: Iterable[bytes] = ()) -> None:
        """Keep the suspects, each with its pieces that were in hand at the deaths that it has not come past.
        `new`: pieces that were in hand at the last one.
        """
        before = self._suspects.pieces
        pieces: dict[bytes, set[bytes]] = {
            key: set() if key in past else set(before.get(key, ())) for key in suspects.watched
        }
        for piece in new:
            if (request := request_of(piece)) in pieces:
                pieces[request].add(piece)
        kept = {key: tuple(sorted(each)) for key, each in pieces.items()}
        self._suspects = replace(suspects, pieces=kept)

    def _write(self) -> None:
        write_atomically(self._endpoints.suspects_file_of(self._role), self._suspects.encode())


def _by_request(seen: Seen) -> Seen:
    """Return what was in hand, with the sequences of a request as one: they have the same text and guide, and
    each may be submitted again by itself.
    """
    return dataclasses.replace(seen, present={request_of(key): mark for key, mark in seen.present.items()})


class EngineDeaths:
    """DeathCounts that are kept in the files of a run directory."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._counts = DeathCounts()

    def count(self, solitary: bytes, now_s: float) -> Verdict:
        """Count a death of the engine, before the next one is started. Raises OSError."""
        suspects = self._counts.count(Seen.read(self._endpoints.roster_file), solitary, now_s)
        write_atomically(self._endpoints.suspects_file, suspects.encode())
        return self._counts.verdict

    def note_end(self, now_s: float) -> None:
        """Record the end of an engine that no request has caused. Raises OSError."""
        seen = Seen.read(self._endpoints.roster_file)
        suspects = self._counts.note_end(seen, now_s)
        if seen.past:
            write_atomically(self._endpoints.suspects_file, suspects.encode())
