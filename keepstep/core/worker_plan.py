"""A planned switch as one worker sees it: heard of ahead, put into the gate when it is due, then entered.

Every rank may know the plan; only a source (a donor of the planned map) puts it into the gate, and only in
the step whose state its target holds. The gate's reduced value then makes all ranks switch at one boundary,
whether they had heard of the plan or not. A target adopts state before it has a generation.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.core.types import Generation, Lineage
from keepstep.core.worker_events import CutGroups, PlanAnnounced, PlanDue, StateAdopted, WorkerAction

ANY_STEP = -1


class PlannedSwitch:
    """The rows about planned generations, for `keepstep.core.worker.WorkerMachine`."""

    worker: int
    shard: str
    held_shard: str | None
    generation: Generation | None
    next_generation: Generation | None
    has_state: bool
    step_count: int
    lineage: Lineage
    _awaited_plan: int  # the gate said so, but the map is not known here yet
    _enter_next: Callable[[], list[WorkerAction]]
    _leave: Callable[[str], list[WorkerAction]]

    def __init__(self) -> None:
        self._plan: Generation | None = None  # announced ahead
        self._due: int | None = None  # the step in which a source puts the plan into the gate, or ANY_STEP

    @property
    def planned(self) -> Generation | None:
        """The planned generation that was announced ahead and not entered yet."""
        return self._plan

    def _hear_plan(self, event: PlanAnnounced) -> list[WorkerAction]:
        plan = event.generation
        if self.generation is None and self.next_generation is None:
            # The target of a planned switch connects ahead and waits for the others.
            if self.worker not in plan.members:
                return []
            self.next_generation = plan
            return self._enter_next()
        if (
            self.generation is not None
            and plan.number == self.generation.number + 1
            and self.next_generation is None
        ):
            if self._awaited_plan == plan.number:
                return self._switch_to(plan)
            self._plan = plan
        return []

    def _hear_due(self, event: PlanDue) -> list[WorkerAction]:
        plan = self._plan
        if plan is not None and plan.number == event.number and self.worker in (plan.donors or plan.ranks):
            self._due = ANY_STEP if event.step is None else event.step
        return []

    def _adopt_state(self, event: StateAdopted) -> list[WorkerAction]:
        self.has_state, self.held_shard = True, self.shard
        self.step_count, self.lineage = event.step, event.lineage
        return []

    def _drop_adopted(self, event: object) -> list[WorkerAction]:
        """Other state is about to be written over what was adopted."""
        self.has_state = False
        return []

    def _pending(self) -> int:
        """What this worker puts into the gate."""
        due = self._plan is not None and self._due in (ANY_STEP, self.step_count)
        return self._plan.number if self._plan is not None and due else 0

    def _switch_to(self, plan: Generation) -> list[WorkerAction]:
        if self.worker not in plan.members:
            return self._leave(f"planned generation {plan.number} goes on without worker {self.worker}")
        self.next_generation = plan
        return [CutGroups(), *self._enter_next()]
