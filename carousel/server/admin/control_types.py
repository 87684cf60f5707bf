"""The bodies of /pause_generation, /continue_generation, /start_profile, /stop_profile, in SGLang's names."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from runtime.wire.messages import MAX_PROFILE_STEPS, PauseMode


class PauseBody(Struct, forbid_unknown_fields=True, kw_only=True):
    mode: PauseMode | None = None
    """Way to pause; default: in_place, which loses nothing."""


class ProfileBody(Struct, forbid_unknown_fields=True, kw_only=True):
    num_steps: Annotated[int, Meta(ge=1, le=MAX_PROFILE_STEPS)] | None = None
    """Number of steps to profile; default: until /stop_profile."""


class EmptyBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body without fields."""
