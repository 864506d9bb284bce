"""Values of hyper-parameters: from the text that `--set` gives, or from Python's own, to what an annotation asks for.

A list or a tuple is written in brackets (setting_lists.py). Refuses with JobError what the annotation does not take.
"""

import types
import typing
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pydantic

from burstpool.errors import JobError
from burstpool.setting_lists import read_json_list, read_list


def convert(value: Any, annotation: Any, *, where: str) -> Any:
    """The value as the annotated type has it; `where` begins what is said of a mistake."""
    try:
        adapter = pydantic.TypeAdapter(annotation)
    except pydantic.PydanticSchemaGenerationError:
        raise JobError(f"{where}: its annotation {annotation!r} is not a type that a text can become") from None
    if value == "None" and _takes_none(adapter):
        return None
    if isinstance(value, str) and _takes_list(annotation) and not (_takes_text(adapter) and not value.startswith("[")):
        return _convert_list(value, adapter, where=where)
    try:
        return adapter.validate_strings(value) if isinstance(value, str) else adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise JobError(f"{where}: {_first_problem(error)}") from None


def _convert_list(text: str, adapter: pydantic.TypeAdapter[Any], *, where: str) -> Any:
    """`[64,128]`: its entries as JSON has them, or as words where the annotation takes texts, or they are no JSON."""
    words = read_list(text, where=where)
    problem = None
    for entries in (read_json_list(text), words):
        try:
            if entries is not None:
                return adapter.validate_python(entries)
        except pydantic.ValidationError as error:
            problem = problem or _first_problem(error)
    raise JobError(f"{where}: {problem}")


def _first_problem(error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = next((f"entry {part} of the list: " for part in first["loc"] if isinstance(part, int)), "")
    return f"{place}{first['msg'][0].lower()}{first['msg'][1:]}"


def _takes_list(annotation: Any) -> bool:
    """Whether a list or a tuple is meant, or may be."""
    kind = typing.get_origin(annotation) or annotation
    if kind in (typing.Union, types.UnionType, typing.Annotated):
        return any(_takes_list(part) for part in typing.get_args(annotation))
    return kind in (list, tuple, Sequence, Iterable, Collection)


def _takes_text(adapter: pydantic.TypeAdapter[Any]) -> bool:
    """Whether a word is a value as it is: `str | list[int]`."""
    try:
        adapter.validate_strings("word")
    except pydantic.ValidationError:
        return False
    return True


def _takes_none(adapter: pydantic.TypeAdapter[Any]) -> bool:
    try:
        return adapter.validate_python(None) is None
    except pydantic.ValidationError:
        return False
