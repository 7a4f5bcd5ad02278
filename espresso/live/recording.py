"""What a session records with: its ring, the script's marks, the signal that has it written, and its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from espresso.comm.execute.executor import Executor
from espresso.live.marks import ScriptMarks, facts_of
from espresso.live.names import BoundModel
from espresso.live.recorder import Recorder


class Recording:
    """The flight recorder of a session at work.

    Args:
        recorder: its ring.
        executor: an error of it has the ring written.
        folder: where; None: nowhere but where a signal asks for it.
        signal, asked: a signal that has it written, and where.
    """

    def __init__(
        self,
        recorder: Recorder,
        executor: Executor,
        model: BoundModel,
        folder: Path | None,
        signal: str | None,
        asked: Path | None,
    ) -> None:
        self._recorder, self._executor, self._folder = recorder, executor, folder
        self._model = model
        executor.on_failure(lambda: recorder.leave(self._folder, "the exchange failed"))
        recorder.look()
        recorder.look_at_card()
        module = model.module()
        self._marks = self._attached()
        recorder.facts |= {"sharded": model.shards is not None} | ({} if module is None else facts_of(module))
        self._unlisten: Callable[[], None] | None = None
        if signal is not None:
            self._unlisten = recorder.listen(signal, asked)

    def pause(self) -> None:
        """Keep no steps and look at no exchanges, until told to go on; a benchmark compares with that."""
        if self._marks is not None:
            self._marks.detach()
        self._recorder.keeps = False
        self._executor.look_at_exchanges(False)

    def go_on(self) -> None:
        """Record again after a pause."""
        self._marks = self._attached()
        self._recorder.keeps = True
        self._executor.look_at_exchanges(True)

    def _attached(self) -> ScriptMarks | None:
        """The script's marks; made from the model anew, which must not be held here: it holds this."""
        module = self._model.module()
        return None if module is None else ScriptMarks(module, self._model.names, self._recorder)

    def end(self) -> None:
        """The job ends: write the ring, unless an error has."""
        self.detach()
        if self._executor.error is None:
            self._recorder.leave(self._folder, "the job ended")

    def detach(self) -> None:
        """Take all hooks off, and the signal."""
        if self._unlisten is not None:
            self._unlisten()
        if self._marks is not None:
            self._marks.detach()
