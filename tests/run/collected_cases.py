"""Cases of training, collected first and then run together in one set of worker processes, and what they must come to.

Starting processes takes longer than most cases train: so all of a module's cases share them.
"""

import pickle
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from run_cases import BatchNormCheck, Case, run_cases, train_alone

from burstpool.engine.local import LocalEngine
from burstpool.job import Job
from burstpool.model.graph import LayerGraph
from burstpool.plan.plan import Plan
from burstpool.run.setup import trace_job
from burstpool.schedule.lower import lower

TOLERANCE = 1e-9
"""Between a plan and one process: what sums in another order may grow to over 50 steps; a wrong gradient is off by
1e-3 after one."""
_SILENCE_S = 120
"""A worker that says nothing for so long is stuck: the run then fails and names what each of them waits for."""


class Cases:
    """Collects cases, runs them, and compares each with training in one process."""

    def __init__(self, num_workers: int, *, checks: Iterable[BatchNormCheck] = ()) -> None:
        self.num_workers, self.checks = num_workers, list(checks)
        self.cases: dict[str, Case] = {}
        self.reference: dict[str, str | dict[str, Any]] = {}
        self.graphs: dict[str, LayerGraph] = {}
        self.alone: dict[str, tuple[dict[str, torch.Tensor], list[float]]] = {}
        self.outcomes: list[list[Any]] = []

    def graph(self, name: str, job: Job) -> LayerGraph:
        """The layers of a job; cases whose names begin with this name up to a slash share it."""
        if name not in self.graphs:
            fallback: Any = "modules" if name == "modules" else None
            self.graphs[name] = trace_job(job, fallback=fallback).graph
        return self.graphs[name]

    def add(self, name: str, job: Job, plan: Plan, *, flow: Any = None, against: Any = None, **changes: Any) -> None:
        """One more case; `against` names another case it must equal, or how to train alone."""
        schedule = lower(plan, flow or self.graphs[name.partition("/")[0]])
        self.cases[name] = Case(name=name, job=job, plan=plan, schedule=schedule, **changes)
        self.reference[name] = against or {}

    def run(self) -> None:
        """All cases, one after the other."""
        with tempfile.TemporaryDirectory() as folder:
            # Not as the workers' task: of more than a pipe holds, each would start only when the one before has it.
            file = Path(folder) / "cases"
            file.write_bytes(pickle.dumps([*self.cases.values(), *self.checks]))
            workers = LocalEngine().start(run_cases, str(file), num_workers=self.num_workers, silence_s=_SILENCE_S)
            try:
                while (results := workers.results()) is None:
                    workers.poll(1.0)
            finally:
                workers.terminate()
        self.outcomes = results

    def states(self, name: str) -> list[dict[str, torch.Tensor]]:
        """What each worker holds at the end."""
        place = list(self.cases).index(name)
        return [outcomes[place].state for outcomes in self.outcomes]

    def losses(self, name: str) -> list[float]:
        """Of each step, over all workers."""
        place = list(self.cases).index(name)
        steps = zip(*(outcomes[place].losses for outcomes in self.outcomes), strict=True)
        return [sum(loss for loss in parts if loss is not None) for parts in steps]

    def check(self, name: str) -> None:
        """Every parameter is held by somebody, and every copy of it, and every loss, is what one process has."""
        state, losses = self._expected(name)
        held = set()
        for own in self.states(name):
            for key, tensor in own.items():
                held.add(key)
                torch.testing.assert_close(tensor, state[key], rtol=0, atol=TOLERANCE, msg=lambda m, k=key: f"{k}: {m}")
        model = self.cases[name].job.build_model()
        assert held >= {key for key, _ in model.named_parameters()} - {"embed.weight"}  # which is head.weight
        torch.testing.assert_close(self.losses(name), losses, rtol=0, atol=TOLERANCE)

    def _expected(self, name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
        against = self.reference[name]
        if isinstance(against, str):
            states = self.states(against)
            (whole,) = [state for state in states if len(state) == max(map(len, states))]
            return whole, self.losses(against)
        case = self.cases[name]
        key = f"{name.partition('/')[0]} {case.plan.batch} {case.steps} {against} {case.options.clip_norm}"
        if key not in self.alone:
            self.alone[key] = train_alone(
                case.job, batch=case.plan.batch, steps=case.steps, clip_norm=case.options.clip_norm, **against
            )
        return self.alone[key]
