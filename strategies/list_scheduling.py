"""List scheduling: the total order in which all lanes take their tasks.

First come, first served: whenever lanes are free, the task that has been ready longest takes them; ties
go to the earlier task. The result depends on nothing but its inputs, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from espresso.strategies.plan import Lane, Plan


def list_order(plan: Plan, ready_us: Sequence[float], duration_us: Sequence[float]) -> tuple[int, ...]:
    """Order ``plan``'s tasks by the start times of a list schedule.

    Args:
        ready_us: when each bucket of the plan becomes ready, by position.
        duration_us: of every task, by index.

    Returns:
        All task indices, a topological order.
    """
    waiting: list[tuple[float, int]] = []
    successor = {task.after: task.index for task in plan.tasks if task.after is not None}
    for task in plan.tasks:
        if task.after is None:
            bucket = plan.groups[plan.partitions[task.partition].group].bucket
            waiting.append((ready_us[plan.position_of_bucket[bucket]], task.index))
    free = dict.fromkeys(Lane, 0.0)
    order: list[int] = []
    while waiting:
        # The task that can start first; among equals the one ready first, then the earlier one.
        _, ready, index = min(
            (max(ready, max(free[lane] for lane in plan.tasks[index].lanes)), ready, index) for ready, index in waiting
        )
        waiting.remove((ready, index))
        task = plan.tasks[index]
        start = max(ready, *(free[lane] for lane in task.lanes))
        end = start + duration_us[index]
        for lane in task.lanes:
            free[lane] = end
        order.append(index)
        if index in successor:
            waiting.append((end, successor[index]))
    return tuple(order)
