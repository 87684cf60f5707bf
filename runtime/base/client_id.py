"""Client ids: random numbers, one for each connection, that prove which tenant they belong to.

    random (31 bits) | tag (32 bits)

The tag is a keyed digest of the random part and the tenant. So a caller who knows a client id of another
tenant can neither claim it nor name any of that client's requests. No process has to remember which tenant an
id belongs to, not even across restarts.
"""

from __future__ import annotations

import hashlib
import secrets

RANDOM_BITS = 31
TAG_BYTES = 4
TAG_BITS = 8 * TAG_BYTES


def draw_client_id(tenant: str, secret: bytes, index: int = 0, count: int = 1) -> int:
    """Return a new id for a client of `tenant`, equal to `index` modulo `count`. secret: key of
    the launch.
    """
    while True:
        random = secrets.randbits(RANDOM_BITS)
        client = random << TAG_BITS | _tag(random, tenant, secret)
        if client and client % count == index:
            return client


def is_client_of(client: int, tenant: str, secret: bytes) -> bool:
    """Return True if the id was drawn for a client of `tenant`. secret: key of the launch."""
    random, tag = client >> TAG_BITS, client & ((1 << TAG_BITS) - 1)
    return tag == _tag(random, tenant, secret)


def _tag(random: int, tenant: str, secret: bytes) -> int:
    # The random part has a fixed length, so two different pairs of random part and name never give the same
    # text.
    text = b"client" + random.to_bytes(4, "little") + tenant.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=TAG_BYTES, key=secret).digest(), "little")
