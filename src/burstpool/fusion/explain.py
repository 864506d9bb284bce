"""Explain: per operator, which way it runs for all members, and why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from burstpool.fusion.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWay:
    """How one operator runs."""

    name: str
    """The captured operator's name, after the names of the regions it lies in."""
    operator: str
    module: str
    """The user's module that called it; "" for the model itself."""
    way: str
    """"rule", "vmap", "loop", or "shared" for what is the same for all members."""
    lowering: str
    """The lowering that was chosen by measuring; "" for the rule's own choice."""
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """All operators of an array, in running order."""

    operators: tuple[OperatorWay, ...]

    def counts(self) -> dict[str, int]:
        """Way → how many operators."""
        return dict(Counter(operator.way for operator in self.operators))

    def __str__(self) -> str:
        rows = [("operator", "module", "way", "why")]
        rows += [
            (o.operator, o.module, o.way + (f" ({o.lowering})" if o.lowering else ""), o.why) for o in self.operators
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def explain(plans: Sequence[Plan]) -> Explanation:
    """The newest plan's operators."""
    operators = []
    for step in plans[-1].inner():
        stack = list((step.node.meta.get("nn_module_stack") or {}).values())
        operators.append(
            OperatorWay(
                name=step.key,
                operator=str(getattr(step.node.target, "__name__", step.node.target)).removeprefix("aten."),
                module=stack[-1][0] if stack else "",
                way=step.lowered.way,
                lowering=step.chosen,
                why=step.lowered.why,
            )
        )
    return Explanation(tuple(operators))
