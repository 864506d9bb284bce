"""Lists in settings: `[64,128]`, as `--set widths=[64,128]` has them and as a run's record keeps them.

Takes texts and lists; returns lists and texts. Entries are words, `"quoted texts"` or lists again, apart by commas; a
word needs no quotes unless it holds a comma or a bracket. What an entry means is the annotation's to say.
"""

import json
from collections.abc import Iterator
from typing import Any

from burstpool.errors import JobError


def parts(text: str, *, where: str, inside: bool = False) -> list[str]:
    """The text cut at the commas that are outside of brackets, as a sweep's values are: `[1,2],[3]` are two.

    `inside`: it is what stands in a list's brackets, where quotes count.
    """
    found, begin, depth = [], 0, 0
    for place, letter in _outside_of_quotes(text, where, inside=inside):
        depth += (letter == "[") - (letter == "]")
        if depth < 0:
            raise JobError(f"{where}: a bracket is closed that was not opened; {_RIGHT}")
        if letter == "," and depth == 0:
            found.append(text[begin:place])
            begin = place + 1
    if depth:
        raise JobError(f"{where}: a bracket is not closed; {_RIGHT}")
    return [*found, text[begin:]]


def read_list(text: str, *, where: str) -> list[Any]:
    """`[64, "a,b", [x]]` as `["64", "a,b", ["x"]]`: words stay texts."""
    stripped = text.strip()
    if len(parts(stripped, where=where)) > 1 or not (stripped.startswith("[") and stripped.endswith("]")):
        raise JobError(f"{where}: a list is written in brackets; {_RIGHT}")
    inner = stripped[1:-1].strip()
    return [_entry(part.strip(), where) for part in parts(inner, where=where, inside=True)] if inner else []


def read_json_list(text: str) -> list[Any] | None:
    """The same with numbers, true, false and null as JSON has them; None where the text is no JSON."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def written_list(value: list[Any] | tuple[Any, ...]) -> str:
    """`[64,"a",[true]]`: what `read_list` and `read_json_list` read."""
    return f"[{','.join(_written(entry) for entry in value)}]"


_RIGHT = "write 'name=[64,128]', and several values of a sweep 'name=[64,64],[128,128]'"


def _outside_of_quotes(text: str, where: str, *, inside: bool) -> Iterator[tuple[int, str]]:
    """The letters that are not in quotes; a quote counts inside of brackets only, and after a backslash it does not."""
    depth, quoted, escaped = int(inside), False, False
    for place, letter in enumerate(text):
        if quoted:
            quoted, escaped = escaped or letter != '"', letter == "\\" and not escaped
        elif letter == '"' and depth > 0:
            quoted = True
        else:
            depth += (letter == "[") - (letter == "]")
            yield place, letter
    if quoted:
        raise JobError(f"{where}: a quote is not closed; {_RIGHT}")


def _entry(text: str, where: str) -> Any:
    if not text:
        raise JobError(f"{where}: the list has an empty entry; {_RIGHT}")
    if text.startswith("["):
        return read_list(text, where=where)
    if not text.startswith('"'):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise JobError(f"{where}: {text} is no quoted text; {_RIGHT}") from None


def _written(entry: Any) -> str:
    return written_list(entry) if isinstance(entry, list | tuple) else json.dumps(entry)
