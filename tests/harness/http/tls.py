"""Certificates of the tests: a self-signed one for localhost and 127.0.0.1, valid until 2126, with a public
key file; and one of an authority that has signed nothing and whose key was never stored.

Made by `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 -subj /CN=localhost
-addext subjectAltName=DNS:localhost,IP:127.0.0.1`, the other with `-subj /CN=nobody -keyout /dev/null`.
"""

from __future__ import annotations

from tests.harness.sources import ROOT

CERTIFICATE = ROOT / "tests" / "data" / "tls_certificate.pem"
KEY = ROOT / "tests" / "data" / "tls_key.pem"
AUTHORITY = ROOT / "tests" / "data" / "unknown_authority.pem"
FILES = {"ssl_certfile": str(CERTIFICATE), "ssl_keyfile": str(KEY)}
"""Settings of a server that has them."""
