"""Push exports to the Hub during training."""

from collections.abc import Sequence

from fla_train.hub.pushes import HubPushes
from fla_train.training.callback import Callback


class Pushes(Callback):
    """Push every `hub.push_every`-th step's export and the last one, on rank 0; see `HubPushes`."""

    def attach(self, trainer) -> None:
        super().attach(trainer)
        mixer = trainer.config.model.get("mixer")
        self._queue = HubPushes(trainer.config.hub, trainer.folder.root, mixer, trainer.log)
        self._queue.resume(trainer.state.step)

    def after_results(self, results: Sequence) -> None:
        self._queue.poll()

    def due(self, step: int) -> bool:
        return not self.trainer.finished and self.trainer.is_due(self.trainer.config.hub.push_every)

    def between_steps(self, step: int) -> None:
        if self.trainer.folder.export(step).is_dir():
            self._queue.add(step)

    def finish(self) -> None:
        """Push the last export after its evaluation, because the card contains the results."""
        self._queue.add(self.trainer.state.step)
        self._queue.finish(self.trainer.watchdog.beat)

    def stop(self) -> None:
        self._queue.stop()
