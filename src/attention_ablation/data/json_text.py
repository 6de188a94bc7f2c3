"""One string out of one long line of JSON, without making an object of the line.

`json.loads` of a 100 MB line takes the line, its text as characters (up to four bytes each) and the string, all at
once. Here the string is found in the bytes and decoded in chunks.
"""

import json
import re
from collections.abc import Iterator

CHUNK_BYTES = 1_048_576  # far over 14, the most that a cut is moved back

# Possessive, or else the matcher keeps a way back for every escape.
_TOKEN = re.compile(rb'"(?P<string>[^"\\]*+(?:\\.[^"\\]*+)*+)"|(?P<open>[{\[])|(?P<close>[}\]])|(?P<comma>,)', re.S)
_ESCAPE_AT_END = re.compile(
    rb"\\(?:u[0-9a-fA-F]{0,3})?\Z|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z"
)


def find_string(line: bytes, field: str) -> tuple[int, int] | None:
    """Where the value of `field` stands in a JSON object, between its quotes; None when that is no string.

    The last one counts where a field is given twice, as in `json.loads`.
    """
    depth, key, found = 0, None, None
    wants_key = False
    for token in _TOKEN.finditer(line):
        kind = token.lastgroup
        if kind == "open":
            depth += 1
            wants_key = depth == 1
            if key == field and depth > 1:
                found, key = None, None
        elif kind == "close":
            depth -= 1
        elif kind == "comma":
            wants_key = depth == 1
        elif depth == 1 and wants_key:
            start, stop = token.span("string")
            key = json.loads(b'"' + line[start:stop] + b'"') if stop - start < CHUNK_BYTES else None
            wants_key = False
        elif depth == 1 and key == field:
            found, key = token.span("string"), None
    return found


def string_chunks(line: bytes, start: int, stop: int, errors: str) -> Iterator[str]:
    """The string that stands in `line` from `start` to `stop`, chunk by chunk, no character cut in two.

    Raises ValueError (UnicodeDecodeError included, its `start` within `line`) where it is no JSON string.
    """
    while start < stop:
        # At least 32 bytes: a cut is moved back by up to 15 (a character and two escapes) and must leave some.
        end = min(stop, start + max(CHUNK_BYTES, 32))
        if end < stop:
            end = _whole(line, start, end)
        try:
            text = line[start:end].decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise UnicodeDecodeError("utf-8", b"", start + error.start, start + error.end, error.reason) from None
        try:
            yield json.loads(f'"{text}"')
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error.msg} at byte {start + error.pos - 1} of the line)") from None
        start = end


def _whole(line: bytes, start: int, end: int) -> int:
    """`end` moved back out of an escape, a pair of escaped surrogates, or a character."""
    for _ in range(3):  # a character has at most three more bytes; a longer run of them is no UTF-8, and told later
        if line[end] & 0xC0 == 0x80:
            end -= 1
    tail = max(start, end - 12)
    while True:
        cut = _ESCAPE_AT_END.search(line, tail, end)
        if cut is None:
            return end
        begin = cut.start()
        backslashes = 0
        while begin - 1 - backslashes >= start and line[begin - 1 - backslashes] == 0x5C:
            backslashes += 1
        if backslashes % 2:  # the backslash found is itself escaped: no escape begins here
            tail = begin + 1
            continue
        return begin
