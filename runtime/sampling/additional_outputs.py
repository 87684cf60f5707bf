"""Additional outputs: names of intermediate results of a model that requests can ask for.

hidden_states:N   the residual stream before layer N; with N = number of layers, behind the final norm
hidden_states     the same with the largest N
self_attn:N       the output of the attention of layer N, from 0 on
mlp:N             the output of the feed-forward of layer N
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from runtime.base.errors import ConfigError, InvalidRequest

HIDDEN_STATES = "hidden_states"
LAYER_OUTPUTS = ("self_attn", "mlp")
"""Names of the parts of a layer whose outputs can be asked for, as the model calls them."""


def check_served(names: Iterable[str], num_layers: int) -> None:
    """Check names against a model with num_layers layers. Raises ConfigError for one that it does
    not have.
    """
    parts = {HIDDEN_STATES: num_layers, **dict.fromkeys(LAYER_OUTPUTS, num_layers - 1)}
    for name in names:
        part, _, number = name.partition(":")
        is_number = number.isascii() and number.isdigit() and str(int(number)) == number
        if name != HIDDEN_STATES and not (part in parts and is_number and int(number) <= parts[part]):
            known = [HIDDEN_STATES, *(f"{part}:0 to {part}:{last}" for part, last in parts.items())]
            raise ConfigError(f"additional_output: this model has no {name!r}; it has {', '.join(known)}")


def check_asked(names: Collection[str], served: Collection[str]) -> None:
    """Check the names that a request asks for. Raises InvalidRequest for names that the server does not
    serve, and for duplicates.
    """
    for name in names:
        if name not in served:
            has = f"it has {', '.join(served)}" if served else "it was started without --additional-output"
            raise InvalidRequest(
                f"additional_outputs: the server has no {name!r}; {has}", param="additional_outputs"
            )
    if len(set(names)) < len(names):
        raise InvalidRequest("additional_outputs: a name comes twice", param="additional_outputs")
