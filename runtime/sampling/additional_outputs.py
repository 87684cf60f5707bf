"""Additional outputs: names of what a model computes on the way to its logits.

hidden_states:N   the residual stream before layer N, of the number of layers that behind the final norm
hidden_states     the same with the largest N
self_attn:N       what the attention of layer N gives, from 0 on
mlp:N             what its feed-forward gives
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from runtime.base.errors import ConfigError, InvalidRequest

HIDDEN_STATES = "hidden_states"
LAYER_OUTPUTS = ("self_attn", "mlp")
"""Parts of a layer whose outputs have a name; the parts are called so in the model."""


def check_served(names: Iterable[str], num_layers: int) -> None:
    """Check names against a model of so many layers. Raises ConfigError for one that it does not have."""
    parts = {HIDDEN_STATES: num_layers, **dict.fromkeys(LAYER_OUTPUTS, num_layers - 1)}
    for name in names:
        part, _, number = name.partition(":")
        is_number = number.isascii() and number.isdigit() and str(int(number)) == number
        if name != HIDDEN_STATES and not (part in parts and is_number and int(number) <= parts[part]):
            known = [HIDDEN_STATES, *(f"{part}:0 to {part}:{last}" for part, last in parts.items())]
            raise ConfigError(f"additional_output: this model has no {name!r}; it has {', '.join(known)}")


def check_asked(names: Collection[str], served: Collection[str]) -> None:
    """Check the names that a request asks for. Raises InvalidRequest for names that a server does not serve,
    or that come twice.
    """
    for name in names:
        if name not in served:
            has = f"it has {', '.join(served)}" if served else "it was started without --additional-output"
            raise InvalidRequest(
                f"additional_outputs: the server has no {name!r}; {has}", param="additional_outputs"
            )
    if len(set(names)) < len(names):
        raise InvalidRequest("additional_outputs: a name comes twice", param="additional_outputs")
