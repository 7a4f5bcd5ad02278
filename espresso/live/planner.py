"""Which strategy each iteration runs: a given one, or one that is measured, searched for, and raced.

Planners are state machines over the iteration count, which is the same on every rank, so all ranks make
the same moves. What needs an exchange (measuring links, comparing step times) is returned from ``after``
and runs while every rank is inside the same hook call.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch

from espresso.comm.execute.executor import Assignment, Record
from espresso.comm.groups import Groups
from espresso.live.candidates import Candidate, Moved
from espresso.live.change import FASTER, TELLING, Cause, Change, Finding
from espresso.live.fixed_planner import Exact, FixedPlanner, InForce, Verdict
from espresso.live.history import Event, History
from espresso.live.online_search import OnlineSearch
from espresso.live.orderer import Orderer, Work
from espresso.live.patience import Patience
from espresso.live.race import Arm, Race
from espresso.live.sounding import Soundings
from espresso.live.turns import DRIFT, PLAIN_MAY, Later, Turn, alike, fresh_of, pays_from, race_of, times_of
from espresso.live.watch import Watch
from espresso.model.job import STEADY
from espresso.search.terms import MAX_CANDIDATES
from espresso.strategies import NONE, Strategy, plan

logger = logging.getLogger("espresso")


AGAIN_STEPS = 40
"""A change that is told again within so many steps is no disturbance."""

LAID_ANEW = 2
"""Steps until buckets that are laid anew are what they will be: DDP orders them by use after the first."""

MOST_ARMS = MAX_CANDIDATES + 2
"""Of the first race: plain and the simple strategy beside the best."""

_QUEUE = threading.Lock()
"""Jobs of one process that decide at once line up for their races one after the other."""


class AutoPlanner:
    """Warm up, profile, search, race the best candidates against plain, keep the fastest; again when something changes.

    ::

        iteration   0 ... w | w ... w+p      | w+p ... | ... decide_by                | then
        runs        plain   | plain, deferred| plain   | plain, A, B, B, A, plain ... | the winner

        a change    | the same iteration           | the next ones                       | then
        is found    | measure what changed, search | the new ones, and plain if it may win, and the winner | the best

    The race begins as late as it may: gradients change most in the first steps of a training, and what compression does
    to them stays in an optimizer's second moments for long (``docs/convergence.md``). Where the profiled steps are far
    apart some of the plain ones before it are profiled too.

    Args:
        plain: the uncompressed strategy.
        search: called after the profiled iterations, and in every turn.
        decide_by: iterations after which the race should be over; it follows the profile at once where it is longer.
        on_profile: told True before the first profiled iteration, in time for its forward pass where it can be, and
            False after the last.
        lay_buckets: has the framework lay its buckets anew, of a size in MiB; whether it will.
        profile_only: measure, and stay plain.
        history: told what was decided, and why.
        adapt: watch the job once it is decided, and decide again when something changes.
        compresses_from: the first iteration in which all compressors do: the profile ends just before it, or later.
        others_race: for how many iterations more other jobs of this process will race; None where it has no others.

    Attributes:
        probed_us: what measuring, searching and trying have cost since the first decision, beyond steps of what stayed.
    """

    def __init__(
        self,
        plain: Strategy,
        groups: Groups,
        search: OnlineSearch,
        *,
        warmup_steps: int,
        profile_steps: int,
        race_steps: int,
        race_rounds: int,
        decide_by: int,
        on_profile: Callable[[bool], None],
        history: History,
        lay_buckets: Callable[[float], bool] | None = None,
        profile_only: bool = False,
        adapt: bool = False,
        compresses_from: int = 0,
        others_race: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._others_race = others_race
        self._groups, self._search, self._on_profile, self.history = groups, search, on_profile, history
        self._profile_steps, self._race_steps, self._race_rounds = profile_steps, race_steps, race_rounds
        self._more_steps = 0
        self._profile_only, self._decide_by = profile_only, decide_by
        self._lay_buckets = None if profile_only else lay_buckets
        self._cap_mb: float | None = None
        self._plain = Orderer(plain, groups)
        self._deferred = Assignment(plain, deferred=True)
        self._winner: Orderer | None = None
        self._warmup_steps, self._compresses_from = warmup_steps, compresses_from
        self._profile_from = self._profiles_from(0)
        self._first: int | None = None
        self._observed: list[Record] = []
        self._race: Race | None = None
        self._turn: Turn | None = None
        self._later: Later | None = None
        self._laid_at: int | None = None
        self._pause = 0
        self._has_tried = False
        self._over = 0.0
        self._candidates: list[Candidate] = []
        self._restarts, self._passed_at = 0, -AGAIN_STEPS
        self._again = False
        self.verdict: Verdict | None = None
        self.watch = Watch(groups) if adapt and not profile_only else None
        self._patience, self._soundings = Patience(), Soundings()
        self._exact, self._why_none = Exact(), ""
        self.probed_us = 0.0

    @property
    def decided(self) -> bool:
        return self.verdict is not None

    @property
    def strategy(self) -> Strategy:
        """The strategy in use once decided, until then the plain one. One that is only tried is not in use."""
        return self._plain.strategy if self._winner is None else self._winner.strategy

    @property
    def to_race(self) -> int:
        """Iterations until a race is over that is to come or under way; 0 without one."""
        race = self._race  # another job's thread asks
        return 0 if race is None else self._pause + race.num_steps

    @property
    def doing(self) -> str:
        """What automatic mode does until it has decided, in words."""
        if self._race is not None:
            names, steps = ", ".join(arm.name for arm in self._race.arms), self._race.num_steps
            waits = f", after {self._pause} plain ones" if self._pause else ""
            return f"races {names} in {steps} steps{waits}"
        if self._again or self._laid_at is not None:
            return "searches again after one of the next steps, which are plain"
        if self._first is None:
            return "begins with the next step"
        if self._observed:
            return f"measures plain steps, {len(self._observed)} of {self._profile_steps + self._more_steps} so far"
        return f"measures plain steps, from step {self._first + self._profile_from} on"

    def measuring(self, step: int) -> tuple[int, int]:
        """Iterations since it began, with this one, and those that measuring takes, as far as it is known."""
        begun = 0 if self._first is None else self._num_begun(step)
        to_come = max(self._profile_from - begun, 0) + self._profile_steps + self._more_steps - len(self._observed)
        return begun, begun + to_come

    def _profiles_from(self, first: int) -> int:
        """Plain iterations before the profile, if it begins with this one."""
        return max(self._warmup_steps, self._compresses_from - self._profile_steps - first)

    def assign(self, iteration: int) -> Assignment:
        if self._race is not None:  # plain comes first in the first one, also while it pauses
            return self._race.assignment
        if self._winner is not None:
            return self._winner.assignment
        if self._again or self._laid_at is not None:
            # DDP orders new buckets anew after their first step: what they hold is looked at in each.
            return replace(self._plain.assignment, drain=False, record=self._laid_at is not None)
        # Iterations are numbered through the life of a job; one that was resumed before it decided starts here.
        if self._first is None:
            self._first = iteration
            self._profile_from = self._profiles_from(iteration)
            self._say("automatic mode: %d steps of warm-up, then %d measured", self._profile_from, self._profile_steps)
        iteration -= self._first
        if iteration < self._profile_from:
            return self._plain.assignment
        if iteration == self._profile_from:
            self._on_profile(True)
        return self._deferred

    def follow(self, in_force: InForce) -> None:
        """Search and race again if it makes another compressor of the one searched for.

        The job is measured already; while it is not, the search to come will find the new compressor.
        """
        if not self._search.follow(in_force) or (self._winner is None and self._race is None):
            return
        self._stop_trying()
        if not self._search.is_measured or not self._observed:
            self._measure_first(after=1)  # this iteration has begun
            return
        self._winner = self.verdict = None
        self._again = True

    def restart(self) -> None:
        """Iterations are counted from elsewhere on: what was counted up to then says nothing."""
        self._patience, self._later = Patience(), None
        if self.verdict is None or self._turn is not None:
            self._stop_trying()
        self._first, self._passed_at = None, -AGAIN_STEPS
        if self.verdict is None:
            self._on_profile(False)
            self._forget_profile()
        else:
            self._decide_by = 0  # its first steps are long past
        self._watch_anew()

    def resume(self, strategy: Strategy, in_force: InForce) -> None:
        """Go on with what was decided before a restart, until something changes: then the job is measured."""
        self._stop_trying()
        self._search.follow(in_force)
        self._winner = Orderer(self._exact.of(strategy), self._groups)  # what was found out stays exact
        self._cap_mb = strategy.bucket_cap_mb
        if not self._search.is_measured:
            self._forget_profile()  # it was measured half, and will be whole
        self.verdict = Verdict("resumed", "the strategy of the checkpoint")
        self._watch_anew()

    def back_off(self, tensors: Collection[str], step: int) -> str:
        """Leave these tensors exact from the next iteration on, in all that is tried later too; the new name."""
        self._exact.add(tensors)
        if self.verdict is None:  # of what was only tried: search again, without
            tried = self._race is not None
            self._stop_trying()
            self._again = tried
            return "plain"
        name = self._exact.named(self.verdict.name)
        strategy = self._plain.strategy if name == "plain" else self._exact.of(self.strategy)
        if not _compresses(strategy):
            name, strategy = "plain", self._plain.strategy
        self._stop_trying()
        self._winner = self._plain if name == "plain" else Orderer(strategy, self._groups)
        self.verdict = Verdict(name, f"at step {step} tensors whose averages were out of their band were left exact")
        self._watch_anew()
        return name

    def keep_to_budget(self) -> None:
        """Have what owes more than it may replaced, when the next window is looked at. All ranks together."""
        if self.watch is not None and self._winner is not None and self._race is None:
            self._over = self._search.over_budget(self._winner.strategy)

    def _stop_trying(self) -> None:
        self._has_tried = self._has_tried or self._race is not None
        self._race, self._turn, self._later, self._candidates = None, None, None, []
        self._pause, self._again, self._laid_at = 0, False, None

    def skip(self, record: Record) -> None:
        """Take note of an iteration that ran something else."""
        if self._race is not None:
            self._race.skip(record)
        if self.watch is not None:
            self.watch.skip(record)

    def after(self, record: Record) -> Work | None:
        if self._again:
            return partial(self._find_candidates, record.iteration)
        if self._laid_at is not None:
            return self._after_laying(self._laid_at, record)
        if self._race is not None:
            return self._after_race(self._race, record)
        if self._winner is not None:
            return self._after_decision(self._winner, record)
        if record.assignment is self._deferred:
            return self._after_profile(record)
        if self._first is not None and record.iteration + 1 == self._first + self._profile_from:
            self._on_profile(True)
        return None

    def _say(self, text: str, *values: object) -> None:
        """Log progress, once for all ranks."""
        if self._groups.speaks:
            logger.info(text, *values)

    # -- profiling -------------------------------------------------------------------------------

    def _after_profile(self, record: Record) -> Work | None:
        self._observed.append(record)
        if len(self._observed) < self._profile_steps + self._more_steps:
            return None
        return partial(self._end_profile, record.iteration)

    def _forget_profile(self) -> None:
        self._observed.clear()
        self._more_steps = 0

    def _end_profile(self, step: int) -> None:
        """Search; but where steps are far apart go on: for as many again at most, and no later than the race allows.
        Where buckets have changed meanwhile, for any shard, begin again.

        What is only profiled is written as soon as it may be: a short script would leave nothing.
        """
        changed = any(record.buckets != self._observed[-1].buckets for record in self._observed)
        if self._restarts < 2 and any(self._groups.everywhere(changed)):
            self._say("the bucket structure changed while profiling; starting over")
            self._forget_profile()
            self._restarts += 1
            return
        spread = self._search.spread(self._observed)
        to_come = MOST_ARMS * self._race_steps * self._race_rounds
        to_come += 0 if self._lay_buckets is None else LAID_ANEW
        more = min(self._profile_steps - self._more_steps, self._decide_by - self._num_begun(step) - to_come)
        if spread > STEADY and more > 0 and not self._profile_only:
            self._more_steps += more
            self._say("the spread of the measured steps is %.1f %%: %d more are measured", 100 * spread, more)
            return
        self._on_profile(False)
        self._find_candidates(step)

    def _num_begun(self, step: int) -> int:
        """Iterations of automatic mode, with this one."""
        return step + 1 - (step if self._first is None else self._first)

    def _find_candidates(self, step: int) -> None:
        self._again = False
        self._say("automatic mode measures links and compressors, and searches; this step takes longer")
        candidates = self._found()
        if self._lays_anew(step):
            return
        if self._profile_only:
            self._decide(step, "plain", "profile only: the job was measured, nothing is compressed")
            return
        if not candidates:
            self._decide(step, "plain", self._why_none)
            return
        self._candidates = candidates
        arms = [Arm("plain", replace(self._plain.assignment, drain=False))]
        arms += [Arm(c.name, c.assignment, c.sent_us) for c in candidates]
        race = Race(arms, block=self._race_steps, rounds=self._race_rounds)
        # In one loop with another job's a step has that one's exchange in it: one race after the other.
        self._line_up(race, self._decide_by - self._num_begun(step) - race.num_steps)
        names, steps = ", ".join(arm.name for arm in arms), race.num_steps
        self._say("automatic mode races %s in %d steps, after %d more plain ones", names, steps, self._pause)

    def _line_up(self, race: Race, pause: int) -> None:
        """Race after so many iterations, or when others that are before this job have raced.

        Of two jobs that decide at once every rank has one first, but not the same one: for both the first rank counts
        that has them both. (Of jobs on ranks that differ, the first of this one's that has any other.)
        """
        with _QUEUE:
            others = self._others_race()
            self._pause = max(others or 0, pause)
            self._race = race
        told = (each for each in self._groups.everywhere(others) if each is not None)
        self._pause = max(next(told, 0), pause)

    def _lays_anew(self, step: int) -> bool:
        """Whether the buckets will be of the size that the search would rather have; then it begins again with those.

        Once in a job: where turns had them laid too, nothing was gained (``docs/benchmarks.md``, weather).
        """
        lay, self._lay_buckets = self._lay_buckets, None
        cap = None if lay is None else self._search.bucket_cap_mb
        if lay is None or cap is None or not lay(cap):
            return False
        self._say("automatic mode has DDP's buckets laid anew, of %g MB", cap)
        self._cap_mb, self._laid_at = cap, step + LAID_ANEW
        self._plain = Orderer(replace(self._plain.strategy, bucket_cap_mb=cap), self._groups)
        return True

    def _after_laying(self, laid_at: int, record: Record) -> Work | None:
        if record.iteration < laid_at:
            return None
        self._laid_at, self._observed = None, [record]
        return partial(self._find_candidates, record.iteration)

    def _found(self) -> list[Candidate]:
        """What the search finds, less what has to stay exact."""
        found, searched = [], self._search(self._observed)
        for candidate in searched:
            asked = replace(candidate.strategy, bucket_cap_mb=self._cap_mb)  # whoever goes on with it needs them too
            strategy = self._exact.of(asked)
            if strategy is asked:
                found.append(replace(candidate, strategy=asked))
            elif _compresses(strategy):  # what was taken out of it changes its tasks
                order = plan(strategy, candidate.buckets, host_copies=self._groups.host_copies).order
                found.append(replace(candidate, strategy=strategy, order=order))
        if not found:
            none = "no strategy is predicted to be faster than plain allreduce"
            out = "tensors whose averages were out of their band stay exact, and nothing else would be compressed"
            self._why_none = self._search.why_none or (out if searched else none)
        return found

    # -- racing ----------------------------------------------------------------------------------

    def _after_race(self, race: Race, record: Record) -> Work | None:
        if self._pause:
            self._pause -= 1
            return None
        return partial(self._compare, race, record.iteration) if race.take(record) else None

    def _compare(self, race: Race, step: int) -> None:
        if not race.compare(self._groups):
            return
        if self._turn is not None:
            self._end_turn(self._turn, race, step)
            return
        best = race.best()
        pays = "compression does not pay here" if best == "plain" else "measured in alternated blocks"
        self._decide(step, best, f"{pays}: {times_of(race)}", race)

    def _decide(self, step: int, name: str, reason: str, race: Race | None = None) -> None:
        self._adopt(name, reason, race)
        self._note(step, Event.DECIDED, reason)

    def _adopt(self, name: str, reason: str, race: Race | None) -> None:
        """Have a raced strategy in use, or plain; and watch it."""
        chosen = next((c for c in self._candidates if c.name == name), None)
        raced = None if race is None else next((arm.assignment for arm in race.arms if arm.name == name), None)
        self._winner = self._plain if chosen is None else Orderer(chosen.strategy, self._groups, raced)
        predicted = {c.name: c.predicted_us for c in self._candidates}
        self.verdict = Verdict(name, reason, {} if race is None else race.measured, predicted)
        self._race = self._later = None
        self._has_tried = self._has_tried or race is not None
        self._watch_anew(self.verdict.measured_us.get(name))

    def _note(self, step: int, event: Event, reason: str, since_ns: int | None = None) -> None:
        verdict = self.verdict
        assert verdict is not None
        unknown = self._search.uncompressed_us if verdict.name == "plain" else 0.0
        predicted = verdict.predicted_us.get(verdict.name, unknown)
        measured = verdict.measured_us.get(verdict.name, 0.0)
        self.history.add(
            step, event, reason, verdict.name, predicted_us=predicted, measured_us=measured, since_ns=since_ns
        )

    def _after_decision(self, winner: Orderer, record: Record) -> Work | None:
        if self._has_tried:  # the first step of the one that stays: the others' buffers are gone
            self._has_tried = False
            self._search.after_trying()
        if self._observed and record.buckets != self._observed[-1].buckets:
            self._observed[-1] = record  # a turn searches in the buckets as they are
        if winner.raced is not None and record.buckets != winner.raced.buckets:
            self._winner = winner = Orderer(winner.strategy, self._groups)
            if self._groups.beside is None:  # other shards may not have noticed
                self._watch_anew()
        ordering, watch = winner.note(record), self.watch
        if watch is None or not watch.take(record):
            return ordering
        # On every rank alike something is to be looked at; most often it is there, and nothing has changed.
        if not watch.is_ready:
            return partial(self._look, watch, record.iteration, ordering)
        return self._answer(watch, watch.look(), record.iteration) or ordering

    # -- a turn: something has changed ---------------------------------------------------------------

    def _answer(self, watch: Watch, change: Change | None, step: int) -> Work | None:
        """What follows from a window that was looked at."""
        change = change or self._sounded(watch, step)
        if change is None:
            return None if watch.is_waiting else self._what_is_due(watch, step)
        if self._patience.permits(change, step):
            return partial(self._begin_turn, change, step)
        self._later = None
        watch.forgive()
        return None

    def _what_is_due(self, watch: Watch, step: int) -> Work | None:
        """A turn, where more is owed than may be; or a switch that pays by now, where steps have not gone back since
        it was found: the change has lasted.
        """
        if self._over:
            change = watch.now(Finding(Cause.OWED, self._over), step)
            if self._patience.permits(change, step):
                return partial(self._begin_turn, change, step)
        verdict, later = self.verdict, self._later
        if verdict is None or later is None or step < later.step:
            return None
        self._later = None
        found_us, now_us = verdict.measured_us[verdict.name], max(row.step for row in watch.latest)
        back = math.copysign(1.0, later.change.step_us[0] - found_us) * math.log(now_us / found_us)
        if watch.came_home or back > TELLING:
            return None
        return partial(self._switch, later.name, later.race, later.change, step)

    def _watch_anew(self, step_us: float | None = None) -> None:
        """Watch another strategy from the next iteration on, whose steps are known to take so long."""
        if self.watch is not None:
            self.watch.begin(step_us)
        self._soundings.begin()
        self._over = 0.0

    def _look(self, watch: Watch, step: int, ordering: Work | None) -> None:
        work = self._answer(watch, watch.look(), step) or ordering
        if work is not None:
            work()

    def _sounded(self, watch: Watch, step: int) -> Change | None:
        """What was heard of a link that may have become faster unseen; the next sounding begins when it is due."""
        change = None
        if watch.heard():
            change, cost_us = self._soundings.take(step, watch.latest)
            self._patience.sounded(cost_us)
            self.probed_us += cost_us
        if self._soundings.is_due(step, watch.latest):
            watch.sound()
        return change

    def _begin_turn(self, change: Change, step: int, *, is_second: bool = False) -> None:
        """Measure what changed, search, and begin to try what was found."""
        assert self.verdict is not None
        assert self._winner is not None
        if self.watch is not None:
            self.watch.hush()  # or it would disturb what is measured now
        began_ns, now = time.perf_counter_ns(), self.verdict.name
        self.history.add(step, Event.CHANGED, str(change), now, measured_us=change.step_us[1])
        if not self._search.is_measured or not self._observed:
            self._measure_first()
            return
        came_home = self.watch is not None and self.watch.came_home
        asked = replace(change, again=step - self._passed_at < AGAIN_STEPS, came_home=came_home)
        with torch.profiler.record_function("espresso::measure and search again"):
            # What owes too much says nothing of links.
            running = self._winner.strategy
            moved = Moved(1.0, 0.0) if change.is_over_budget else self._search.revise(asked, running)
            moved = Moved.of_all(self._groups.everywhere(tuple(moved)))
            change = change.with_link(moved.link)
            turn = Turn(change, step, began_ns, is_second)
            nothing = moved.most < TELLING and not change.is_over_budget
            if nothing and change.is_severe and asked.blames_link and not asked.again:
                self._let_pass(turn, step)
                return
            if self.watch is not None and not change.is_over_budget:
                self.watch.came_home = False
            if nothing and not change.is_severe:
                self._end_turn(turn, None, step, "nothing has moved much")
                return
            found = self._found()
        kept = self._winner.assignment
        same = [alike(candidate.strategy, kept.strategy) for candidate in found]
        ours_us, sent_us = self._search.foresees(kept.strategy)
        figures = self._search.uncompressed_us, ours_us, sent_us, self._search.foresees(self._plain.strategy)[1]
        told = self._groups.everywhere((same, figures))
        same = [all(column) for column in zip(*(theirs for theirs, _ in told), strict=True)]
        columns = zip(*(figures for _, figures in told), strict=True)
        plain_us, ours_us, sent_us, plain_sent_us = (max(column) for column in columns)
        if not change.is_over_budget:
            # The pause in which all is measured fills a token bucket; the steps that were watched had none.
            in_use = Arm(now, replace(kept, drain=kept.strategy.compresses), min(sent_us, change.step_us[1]))
            turn = replace(turn, in_use=in_use, predicted_us=ours_us)
        fresh = fresh_of(turn, found, same, now)
        best_us = min((c.predicted_us for c in found), default=0.0)
        arms = [*filter(None, [turn.in_use]), *(Arm(c.name, c.assignment, c.sent_us) for c in fresh)]
        plain = Arm("plain", replace(self._plain.assignment, drain=False), plain_sent_us)
        if not arms or (now != "plain" and (not found or plain_us <= PLAIN_MAY * best_us)):
            arms.append(plain)
        self._candidates = [c for c in self._candidates if c.name == now] + fresh
        if len(arms) == 1:
            self._end_turn(turn, None, step, "the search finds nothing else", arms[0].name)
            return
        self._turn = replace(turn, spent_us=turn.lasts_us)
        self._race = race_of(turn, arms, best_us, moved.link)
        self._pause = 0
        self._search.before_trying()
        self._say("automatic mode tries %s", ", ".join(arm.name for arm in arms))

    def _let_pass(self, turn: Turn, step: int) -> None:
        """The link is as it was: a disturbance, unless it is told again at once, against the same baseline."""
        spent_us = max(self._groups.everywhere(turn.lasts_us))
        self._patience.took(step, spent_us, brought=False)
        self.probed_us += spent_us
        self._passed_at = step
        if self.watch is not None:
            self.watch.forgive()
        self._note(step, Event.KEPT, "the link is as it was", turn.began_ns)

    def _measure_first(self, after: int = 0) -> None:
        """A resumed job, which was never measured here, decides as a new one, after so many steps."""
        self._winner = self.verdict = self._first = None
        self._warmup_steps, self._decide_by = after, 0
        if not after:
            self._on_profile(True)

    def _end_turn(self, turn: Turn, race: Race | None, step: int, why: str = "", only: str = "") -> None:
        """Adopt the best of a race, or stay.

        Args:
            why: where there is no race.
            only: what is in use then, if that is another strategy.
        """
        verdict = self.verdict
        assert verdict is not None
        self._turn = None
        began_us, ours = turn.change.step_us[1], verdict.name
        best = only or ours if race is None else race.best()
        measured = {best: began_us} if race is None else race.measured
        took = measured if race is None else race.took
        drift = took.get(ours, began_us) / began_us
        later = None
        if race is not None and turn.in_use is not None and best != ours:
            due = pays_from(turn.change, race, ours, best)
            if step < due:
                later = Later(due, best, race, turn.change) if due < math.inf else None
                best = ours
        spent_us = turn.lasts_us if race is None else turn.spent_us + race.spent_us(best)
        spent_us = max(self._groups.everywhere(spent_us))
        self._patience.took(step, spent_us, brought=best != ours)
        self.probed_us += spent_us
        if best != ours:
            self._switch(best, race, turn.change, step, turn.began_ns)
            self._look_again(turn, drift, measured[best], step)
            return
        times = why if race is None else times_of(race)
        if later is not None:
            times += f"; {later.name} pays if this lasts until step {math.ceil(later.step)}"
        self._race, self._later = None, later
        told = {ours: turn.predicted_us} if turn.predicted_us else {}
        # What others took before the change says nothing now.
        self.verdict = replace(verdict, measured_us=measured, predicted_us=verdict.predicted_us | told)
        self._has_tried = self._has_tried or race is not None
        if self.watch is not None:
            self.watch.begin(measured[ours], is_another=False, stands=later is None)
        if turn.change.hidden_us or FASTER * (turn.change.ratio(Cause.LINK) or 1.0) <= 1:
            self._soundings.begin()  # what the link took before says nothing
        self._note(step, Event.KEPT, times, turn.began_ns)
        self._look_again(turn, drift, measured[ours], step)

    def _look_again(self, turn: Turn, drift: float, now_us: float, step: int) -> None:
        """Begin another turn at once, where meanwhile steps have changed again, and not back.

        Args:
            drift: so many times as long steps of what was in use took in the race as when the turn began.
            now_us: a step of what is in use now.
        """
        before_us, began_us = turn.change.step_us
        is_over = abs(math.log(drift * began_us / before_us)) < TELLING
        if abs(math.log(drift)) > DRIFT and not is_over and not turn.is_second:
            more = Change((Finding(Cause.STEP, drift),), step, (now_us / drift, now_us), turn.change.compute_us)
            self._patience.follows(more)
            self._begin_turn(more, step, is_second=True)

    def _switch(self, name: str, race: Race | None, change: Change, step: int, since_ns: int | None = None) -> None:
        """Have what a turn found in use: at its end, or once it pays."""
        assert self.verdict is not None
        ours, times = self.verdict.name, "nothing else may run" if race is None else times_of(race)
        self._adopt(name, f"{change}: {times}", race)
        self._note(step, Event.SWITCHED, f"from {ours}: {times}", since_ns)


def _compresses(strategy: Strategy) -> bool:
    """Whether any tensor is compressed, also of other shards, which have to decide alike."""
    return any(choice.compressor != NONE for choice in strategy.known.values())


Decider = FixedPlanner | AutoPlanner
"""Says which strategy each iteration runs, whether it is settled (``decided``), and why (``verdict``)."""
