"""Regular expressions of the supported formats. Each matches only values that the format allows, though not
all of them.
"""

from __future__ import annotations

_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,20}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_DATE = (
    r"\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_YEAR_DATE = _DATE.replace(r"\d{4}", r"(?:[1-9]\d{3}|0\d{2}[1-9])", 1)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+\-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_GROUP = r"[0-9a-fA-F]{1,4}"
_IN_DAY = r"T(?:\d{1,9}H(?:\d{1,9}M(?:\d{1,9}S)?)?|\d{1,9}M(?:\d{1,9}S)?|\d{1,9}S)"
_DAYS = r"(?:\d{1,9}Y(?:\d{1,9}M(?:\d{1,9}D)?)?|\d{1,9}M(?:\d{1,9}D)?|\d{1,9}D)"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?\^_`{|}~\-]{1,20}"
_PATH = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"

FORMATS = {
    "date-time": f"{_YEAR_DATE}T{_TIME}",
    "time": _TIME,
    "date": _YEAR_DATE,
    "duration": rf"P(?:{_DAYS}(?:{_IN_DAY})?|{_IN_DAY}|\d{{1,9}}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": "|".join(
        [
            f"(?:{_GROUP}:){{7}}{_GROUP}",
            f"(?:{_GROUP}(?::{_GROUP}){{0,2}})?::(?:{_GROUP}(?::{_GROUP}){{0,2}})?",
        ]
    ),
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.\-]{{0,15}}:(?://{_HOST}(?::\d{{1,4}})?)?(?:/{_PATH}{{1,40}}){{0,8}}"
    rf"(?:\?{_PATH}{{0,60}})?(?:#{_PATH}{{0,60}})?",
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
