"""Trace the steps in `trainer.profile_steps`."""

from collections.abc import Sequence
from contextlib import ExitStack

from fla_train.data.sampler import Batch
from fla_train.training.callback import Callback
from fla_train.utils.profiling import profiled


class Profile(Callback):
    """Write a trace of the chosen steps to the folder `profile` of the run."""

    def before_step(self, step: int, micro_batches: Sequence[Batch]) -> None:
        self._trace = ExitStack()
        if step in self.trainer.config.trainer.profile_steps:
            folder = self.trainer.folder.root / "profile"
            self._trace.enter_context(profiled(folder, step, self.trainer.rank))

    def after_step(self, step: int, metrics: dict) -> None:
        self._trace.close()
