"""States that training sequences start from: of other sequences, of the text before, or noise.

`trainer.initial_state=passing` gives each sequence the final state of one of the last step, `noise` a
Gaussian state (arXiv 2507.02782). With `data.contiguous` a row continues from its own states and convolution
inputs, which is truncated back-propagation through time. Nothing here has a gradient. Rows are numbered over
all ranks, as the order of the data numbers them, so neither ranks nor micro-batches change what a row starts
from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fla_train.data.dataset import permute
from fla_train.data.sampler import Batch, BatchSampler, send
from fla_train.models.carried_states import CONV, RECURRENT, CarriedStates, StateKey
from fla_train.training.checkpoint import STATES_FILE, world_size
from fla_train.training.config import TrainConfig

MEMORY = 0.99  # of the moments that fitted noise has: about the last hundred steps count


class InitialStates:
    """The states of this rank's rows from step to step. All ranks make one and call it alike.

    Args:
        kind: "passing", "noise" or "contiguous".
        noise: standard deviation of the noise; None: mean and deviation of each head's final states.
        zero_share: of the rows, start from zero at each step; has no effect on "contiguous".
        sampler: which rows of a step are this rank's.
        layers: number of the model's.
    """

    def __init__(
        self,
        kind: str,
        *,
        noise: float | None,
        zero_share: float,
        seed: int,
        sampler: BatchSampler,
        layers: int,
        device: torch.device,
    ):
        self._kind, self._noise, self._zero_share, self._seed = kind, noise, zero_share, seed
        self._layers, self._device, self._sampler = layers, device, sampler
        # Row numbers of each rank, [accumulation x micro_batch], in the order in which it keeps them
        ranks = range(sampler.world)
        self._rows_of = [replace(sampler, rank=rank).indices(0).flatten() for rank in ranks]
        self._rows = self._rows_of[sampler.rank]
        self._start: dict[StateKey, Tensor] = {}  # [rows of this rank, ...] by state
        self._end: dict[StateKey, Tensor] = {}  # [micro_batch, ...] final states of the newest pass
        self._sums = self._moments = torch.empty(0)  # [3, heads of all states]: count, sum, sum of squares
        self.passes: list[CarriedStates] = []  # one for each micro-batch, always the same objects

    @classmethod
    def of_run(
        cls,
        config: TrainConfig,
        sampler: BatchSampler,
        engine,
        resume: Path | None,
        log: Callable[[str], None],
    ) -> "InitialStates | None":
        """Those of a run, as its checkpoint left them; None: its sequences start from zero.

        Args:
            resume: the checkpoint to start from.
            log: gets a line about what starts from zero though the run does not say so.
        """
        trainer = config.trainer
        kind = config.initial_states
        if kind == "zero":
            return None
        model = engine.module.config
        states = cls(
            kind,
            noise=None if trainer.state_noise == "fitted" else float(trainer.state_noise),
            zero_share=trainer.zero_state_share,
            seed=config.seed,
            sampler=sampler,
            layers=len(model.layer_types),
            device=engine.device,
        )
        if model.attention_layers:
            log("states       attention layers carry nothing: they see their own sequence only")
        if resume is not None and (why := states.load(resume)):
            log(f"states       {why}: the sequences of the next step start from zero")
        return states

    def prepare(self, engine, batch: Batch) -> None:
        """Learn the states' shapes by a pass over a micro-batch, unless a checkpoint has told them."""
        if self.passes:
            return
        engine.eval()
        with torch.no_grad():
            ids = batch.input_ids.view(self._sampler.micro_batch, -1)
            cache = engine(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        engine.train()
        kinds = {RECURRENT: "recurrent_states", CONV: "conv_states"}
        if self._kind != "contiguous":  # the inputs of a convolution are text, not memory
            del kinds[CONV]
        self._allocate(
            {
                StateKey(kind, number, index): state.new_zeros(len(self._rows), *state.shape[1:])
                for number, layer in enumerate(cache.layers)
                for kind, name in kinds.items()
                for index, state in getattr(layer, name, {}).items()
                if state is not None and state.numel()
            }
        )

    def begin(self, step: int, batches: Sequence[Batch]) -> None:
        """Make the states that the rows of optimizer step `step` (from 0) start from."""
        if self._kind == "contiguous":
            zero = ~torch.cat([batch.continues for batch in batches])
        else:
            draw = np.random.default_rng((self._seed, step)).random(self._sampler.global_batch)
            zero = self._to_device(draw[self._rows] < self._zero_share)
            if self._kind == "passing":
                self._shuffle(step)
            else:
                self._draw(step)
        for state in self._start.values():
            state.masked_fill_(_like(zero, state), 0)

    def end_pass(self, number: int) -> None:
        """Take over what micro-batch `number` of the step, whose backward pass is done, has left."""
        sums = [state.flatten(1).sum(1, dtype=torch.float32) for state in self._end.values()]
        lost = ~torch.stack(sums).isfinite().all(0)  # a NaN would spoil the row's later steps, too
        for state in self._end.values():
            state.masked_fill_(_like(lost, state), 0)
        if self._kind == "noise":
            for key, (_, heads) in self._heads().items():
                end = self._end[key]
                end = end.view(*end.shape[:2], -1)  # [rows, heads, elements]
                self._sums[0, heads] += (~lost).sum() * end.shape[2]
                self._sums[1, heads] += end.sum((0, 2), dtype=torch.float64)
                self._sums[2, heads] += end.square().sum((0, 2), dtype=torch.float64)
            return
        for key, start in self._views(number).items():
            start.copy_(self._end[key])

    def end_step(self) -> None:
        """Add the step's final states to the moments of fitted noise, those of all ranks."""
        if self._kind == "noise":
            dist.all_reduce(self._sums)
            self._moments.lerp_(self._sums, 1 - MEMORY)
            self._sums.zero_()

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds of this rank; the tensors are those that the next `begin` changes."""
        content = {"kind": self._kind, "rows": torch.from_numpy(self._rows)}
        if self._kind == "noise":
            return content | {"moments": self._moments}
        return content | {"states": {".".join(map(str, key)): state for key, state in self._start.items()}}

    def load(self, folder: Path) -> str | None:
        """Take over what all ranks of a checkpoint have saved, however many they were.

        Returns:
            Why nothing was taken over; None: it was.
        """
        from fla_train.training.load_checkpoint import (
            load_file,
        )  # imports DeepSpeed, which then picks its device

        files = [folder / STATES_FILE.format(rank=rank) for rank in range(world_size(folder))]
        if not files[0].exists():
            return f"{folder.name} holds no states"
        contents = [load_file(file, mmap=True) for file in files]
        if (kind := contents[0]["kind"]) != self._kind:
            return f"the states of {folder.name} are of another kind ({kind})"
        if kind == "noise":
            self._moments = contents[0]["moments"].to(self._device, copy=True)
            return None
        where = {
            row: (rank, place)
            for rank, content in enumerate(contents)
            for place, row in enumerate(content["rows"].tolist())
        }
        if len(where) != self._sampler.global_batch:
            return f"{folder.name} has {len(where)} rows, a step now {self._sampler.global_batch}"
        if not contents[0]["states"]:
            return f"{folder.name} was saved before a step"
        start = {}
        for name, example in contents[0]["states"].items():
            kind, layer, index = name.split(".")
            key = StateKey(kind, int(layer), int(index))
            start[key] = example.new_empty(len(self._rows), *example.shape[1:])
            for target, row in zip(start[key], self._rows.tolist(), strict=True):
                rank, place = where[row]
                target.copy_(contents[rank]["states"][name][place])
        self._allocate({key: state.to(self._device) for key, state in start.items()})
        return None

    def _allocate(self, start: Mapping[StateKey, Tensor]) -> None:
        """Keep `start`, and hand out its rows by micro-batches."""
        self._start = dict(start)
        micro_batch = self._sampler.micro_batch
        self._end = {key: torch.empty_like(state[:micro_batch]) for key, state in start.items()}
        self.passes = [
            CarriedStates(self._views(number), self._end, self._layers)
            for number in range(self._sampler.accumulation)
        ]
        if self._kind == "noise":
            heads = sum(state.shape[1] for state in start.values())
            self._sums = torch.zeros(3, heads, dtype=torch.float64, device=self._device)
            if not self._moments.numel():
                self._moments = torch.zeros_like(self._sums)

    def _views(self, number: int) -> dict[StateKey, Tensor]:
        """The rows of micro-batch `number`."""
        micro_batch = self._sampler.micro_batch
        first = number * micro_batch
        return {key: state[first : first + micro_batch] for key, state in self._start.items()}

    def _shuffle(self, step: int) -> None:
        """Give each row the state of the row that a permutation of all ranks' rows names."""
        rows, rank, world = self._sampler.global_batch, self._sampler.rank, self._sampler.world
        source = permute(np.arange(rows), rows, self._seed, step)
        owner, place = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
        for other, theirs in enumerate(self._rows_of):
            owner[theirs], place[theirs] = other, np.arange(len(theirs))
        wanted = [source[theirs] for theirs in self._rows_of]  # by each rank, in the order of its rows
        sent = [place[theirs[owner[theirs] == rank]] for theirs in wanted]
        received = owner[wanted[rank]]  # from which rank; they come in the order of ranks
        sizes = np.bincount(received, minlength=world).tolist(), [len(part) for part in sent]
        taken = self._to_device(np.concatenate(sent))
        put = self._to_device(np.argsort(received, kind="stable"))
        for state in self._start.values():
            mine = arrived = state[taken]
            if world > 1:
                arrived = torch.empty_like(state)
                dist.all_to_all_single(arrived, mine, *sizes)
            state[put] = arrived

    def _draw(self, step: int) -> None:
        """Gaussian states; of each row by a random stream of its own."""
        generator = torch.Generator(self._device)
        for place, row in enumerate(self._rows.tolist()):
            seed = np.random.SeedSequence((self._seed, step, row)).generate_state(1, np.uint64)
            generator.manual_seed(int(seed[0]))
            for state in self._start.values():
                state[place].normal_(generator=generator)
        count, total, squares = self._moments
        mean = total / count.clamp(min=1e-30)
        deviation = (squares / count.clamp(min=1e-30) - mean.square()).clamp(min=0).sqrt()
        for state, heads in self._heads().values():
            if self._noise is not None:
                state.mul_(self._noise)
                continue
            shape = (1, -1, *[1] * (state.ndim - 2))
            state.mul_(deviation[heads].to(state).view(shape)).add_(mean[heads].to(state).view(shape))

    def _heads(self) -> dict[StateKey, tuple[Tensor, slice]]:
        """Each state, and the place of its heads (its second axis) among those of all states."""
        found, first = {}, 0
        for key, state in self._start.items():
            found[key] = state, slice(first, first + state.shape[1])
            first += state.shape[1]
        return found

    def _to_device(self, values: np.ndarray) -> Tensor:
        return send(torch.from_numpy(values), self._device)


def _like(rows: Tensor, state: Tensor) -> Tensor:
    """A value for each row [R], to broadcast with a state [R, ...]."""
    return rows.view(-1, *[1] * (state.ndim - 1))
