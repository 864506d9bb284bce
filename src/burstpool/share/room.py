"""Room: which background job leaves a GPU's memory when the foreground needs it, and which one comes back.

Takes how much is free and who holds what. Returns at most one move: what it frees is not known before it is done. Pure:
no clock, no torch; the same rule holds on a device and in a test.

- Background jobs start as long as a tenth of the memory stays free. When less than a twentieth is, the one that holds
  most leaves.
- One comes back when a tenth would stay free with it, the one that has been away longest first.
- Each time it leaves it stays away twice as long, so that a foreground that needs the memory now and then is not
  disturbed each time.
- Leaving and coming back stop the foreground for a moment. Nobody comes back before such stops are at most a fifth of
  what the budget allows.

Ignores: the memory of the host, which takes what leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

RESERVE = 0.10
"""Share of the GPU's memory that stays free when a background job starts or comes back."""
FLOOR = 0.05
"""Share below which one must leave."""
_PAUSES = 0.2
"""Share of the budget that may go into leaving and coming back."""
_SHORTEST_S, _LONGEST_S = 1.0, 120.0
"""How long a job stays away at least, the first time and after many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A background job, as far as memory goes."""

    held_bytes: int
    """What it takes of the GPU's memory while it is here."""
    here: bool
    over: bool = False
    """Whether it is not run any more: the first to leave, never to come back."""
    away_s: float = 0.0
    """How long it has been away."""
    pause_s: float = 0.0
    """For how long leaving and coming back stop the foreground, as far as known."""
    evictions: int = 0
    """How often it had to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Who is to go or to come."""

    tenant: int
    """Its place among the tenants."""
    leaves: bool
    """Else it comes back."""


def next_move(free_bytes: int, total_bytes: int, tenants: Sequence[Tenant], *, slowdown: float) -> Move | None:
    """What to do now; None for nothing."""
    if free_bytes < FLOOR * total_bytes:
        first = largest(tenants)
        return None if first is None else Move(tenant=first, leaves=True)
    fit = [
        place
        for place, tenant in enumerate(tenants)
        if not tenant.here
        and not tenant.over
        and free_bytes - tenant.held_bytes >= RESERVE * total_bytes
        and tenant.away_s >= stays_away_s(tenant, slowdown=slowdown)
    ]
    return Move(tenant=max(fit, key=lambda place: tenants[place].away_s), leaves=False) if fit else None


def largest(tenants: Sequence[Tenant]) -> int | None:
    """Who of those that are here holds most, those that are over before others; None where nobody is."""
    here = [place for place, tenant in enumerate(tenants) if tenant.here]
    return max(here, key=lambda place: (tenants[place].over, tenants[place].held_bytes)) if here else None


def stays_away_s(tenant: Tenant, *, slowdown: float) -> float:
    """How long a job that has left stays away at least."""
    patience_s: float = min(_SHORTEST_S * 2.0 ** max(tenant.evictions - 1, 0), _LONGEST_S)
    return max(patience_s, tenant.pause_s / (_PAUSES * (slowdown - 1)))
