"""Compile-time checks that a ctypes structure equals the C++ structure of the same name. A difference would
make code read and write beyond fields.
"""

from __future__ import annotations

import ctypes


def layout_check(name: str, structure: type[ctypes.Structure]) -> str:
    """Return C++ code that compiles only if carousel::`name` has the same fields as `structure`: names,
    number, offsets, sizes and kinds.
    """
    fields = [field[0] for field in structure._fields_]
    tests = [f"sizeof({name}) == {ctypes.sizeof(structure)}"]
    for field, kind in ((each[0], each[1]) for each in structure._fields_):
        layout = getattr(structure, field)
        member = f"decltype({name}::{field})"
        is_pointer = kind in (ctypes.c_void_p, ctypes.c_char_p)
        tests += [
            f"offsetof({name}, {field}) == {layout.offset}",
            f"sizeof({name}::{field}) == {layout.size}",
            f"std::is_pointer_v<{member}> == {_bool(is_pointer)}",
            f"std::is_floating_point_v<{member}> == {_bool(kind is ctypes.c_float)}",
        ]
    asserts = "".join(f'static_assert({test}, "{name} of ctypes differs");\n' for test in tests)
    # Raises if there are more or fewer names than fields.
    names = ", ".join(f"{field}_" for field in fields)
    count = f"inline void has_all_fields({name}& call) {{ [[maybe_unused]] auto& [{names}] = call; }}\n"
    return f"#include <cstddef>\n#include <type_traits>\nnamespace carousel {{\n{asserts}{count}}}\n"


def _bool(value: bool) -> str:
    return "true" if value else "false"
