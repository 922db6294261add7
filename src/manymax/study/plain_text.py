"""Text for a terminal: control characters are shown and do nothing.

Names in data may hold escape sequences, which clear the screen, set the title of the window or write the clipboard. By
the standard library alone, as the command line must print errors where the extra `study` is missing.
"""

from __future__ import annotations

# Those of ASCII and of Latin-1, and those by which Unicode turns the direction of what follows, or ends a line.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {code: repr(chr(code))[1:-1] for code in _CONTROLS}
_SHOWN_IN_LINES = {code: text for code, text in _SHOWN.items() if chr(code) not in "\n\t"}


def in_one_line(text: str) -> str:
    r"""A name from data, with all control characters as text, those that end a line too.

    Example:
        >>> print(in_one_line("\x1b[2Ja\nb"))
        \x1b[2Ja\nb
    """
    return text.translate(_SHOWN)


def in_lines(text: str) -> str:
    r"""A text with control characters as text, except for tabulators and ends of lines.

    Example:
        >>> print(in_lines("a\x07\nb"))
        a\x07
        b
    """
    return text.translate(_SHOWN_IN_LINES)
