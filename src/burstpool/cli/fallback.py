"""`--fallback`, of every verb that traces a job: what to do with a model that cannot be traced by operators."""

from typing import Annotated, Literal

import typer

from burstpool.errors import TraceError

Fallback = Annotated[str | None, typer.Option(help="modules: split between modules where tracing fails.")]


def checked_fallback(text: str | None) -> Literal["modules"] | None:
    """As `trace` takes it."""
    if text not in (None, "modules"):
        raise TraceError(f"--fallback {text} is unknown; the only fallback is modules")
    return "modules" if text else None
