"""Start training sequences from states of other sequences, of the preceding text, or from noise.

- `trainer.initial_state=passing`: each sequence starts from the final state of a sequence of the last step
- `trainer.initial_state=noise`: from a Gaussian state (both: arXiv 2507.02782)
- `data.contiguous`: each row continues from its final states and convolution inputs, which is truncated
  back-propagation through time

None of these states has a gradient. Rows are numbered over all ranks, in the order of the data, so a row's
state depends neither on the number of ranks nor on the micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fla_train.data.sampler import Batch, send
from fla_train.models.build import model_settings
from fla_train.models.carried_states import CONV, RECURRENT, CarriedStates, StateKey
from fla_train.training.callback import Callback
from fla_train.training.config import TrainConfig
from fla_train.utils.permutation import permute

# Decay of the moments for fitted noise, so that about the last hundred steps count.
MEMORY = 0.99


class InitialStates(Callback):
    """Keep the states of this rank's rows from step to step, as the keys above of a resolved config say."""

    name = "initial_states"
    changes_in_place = True

    def memory(self, config: TrainConfig) -> int:
        """Return the bytes of this rank's rows of a step and of one more micro-batch."""
        model = model_settings(config.model)
        layers = model.layer_types.count("linear_attention")
        row = 4 * layers * model.value_heads * model.head_dim * model.head_v_dim
        return row * config.trainer.micro_batch_size * (config.num_accumulated + 1)

    def attach(self, trainer) -> None:
        super().attach(trainer)
        config, engine, sampler = trainer.config, trainer.engine, trainer.batches
        self._source, self._seed = config.initial_states, config.seed
        self._noise, self._zero_fraction = config.trainer.state_noise, config.trainer.zero_state_share
        self._engine, self._device, self._sampler = engine, engine.device, sampler
        if engine.module.config.attention_layers:
            trainer.log("states       attention layers carry nothing: they see their own sequence only")
        # Row numbers of each rank, [accumulation x micro_batch], in the order in which the rank keeps them.
        ranks = range(sampler.world)
        self._rows_of = [replace(sampler, rank=rank).indices(0).flatten() for rank in ranks]
        self._rows = self._rows_of[sampler.rank]
        self._start: dict[StateKey, Tensor] = {}  # state -> [rows of this rank, ...]
        self._end: dict[StateKey, Tensor] = {}  # [micro_batch, ...] final states of the newest pass
        self._sums = self._moments = torch.empty(0)  # [3, heads of all states]: count, sum, sum of squares
        # One object for each micro-batch. The objects never change.
        self._passes: list[CarriedStates] = []

    def before_step(self, step: int, micro_batches: Sequence[Batch]) -> None:
        """Compute the states from which the rows of optimizer step `step` (from 1) start."""
        self._prepare(micro_batches[0])
        if self._source == "contiguous":
            zero = ~torch.cat([batch.continues for batch in micro_batches])
        else:
            draw = np.random.default_rng((self._seed, step - 1)).random(self._sampler.global_batch)
            zero = self._to_device(draw[self._rows] < self._zero_fraction)
            if self._source == "passing":
                self._shuffle(step - 1)
            else:
                self._draw(step - 1)
        for state in self._start.values():
            state.masked_fill_(_like(zero, state), 0)

    def model_inputs(self, number: int, batch: Batch) -> Mapping[str, CarriedStates]:
        self._prepare(batch)
        return {"states": self._passes[number]}

    def after_backward(self, number: int) -> None:
        """Store the final states of micro-batch `number` for the next step."""
        sums = [state.flatten(1).sum(1, dtype=torch.float32) for state in self._end.values()]
        lost = ~torch.stack(sums).isfinite().all(0)  # a NaN would also spoil the row's later steps
        for state in self._end.values():
            state.masked_fill_(_like(lost, state), 0)
        if self._source != "noise":
            for key, start in self._views(number).items():
                start.copy_(self._end[key])
            return
        for key, (_, heads) in self._heads().items():
            end = self._end[key]
            end = end.view(*end.shape[:2], -1)  # [rows, heads, elements]
            self._sums[0, heads] += (~lost).sum() * end.shape[2]
            self._sums[1, heads] += end.sum((0, 2), dtype=torch.float64)
            self._sums[2, heads] += end.square().sum((0, 2), dtype=torch.float64)
        if number == self._sampler.accumulation - 1:
            dist.all_reduce(self._sums)
            self._moments.lerp_(self._sums, 1 - MEMORY)
            self._sums.zero_()

    def state_dict(self) -> dict[str, Any]:
        content = {"source": self._source, "rows": torch.from_numpy(self._rows)}
        if self._source == "noise":
            return content | {"moments": self._moments}
        return content | {"states": {".".join(map(str, key)): state for key, state in self._start.items()}}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore each row's states, whichever rank saved them. Log why they start from zero instead."""
        first, rows = states[0], sum(len(state["rows"]) for state in states)
        if first["source"] != self._source or rows != self._sampler.global_batch:
            self.trainer.log(f"states       {rows} rows of {first['source']} don't fit: all start from zero")
            return
        if self._source == "noise":
            self._moments = first["moments"].to(self._device, copy=True)
            return
        saved_at = {
            row: (rank, index)
            for rank, content in enumerate(states)
            for index, row in enumerate(content["rows"].tolist())
        }
        start = {}
        for name, example in first["states"].items():
            kind, layer, index = name.split(".")
            key = StateKey(kind, int(layer), int(index))
            start[key] = example.new_empty(len(self._rows), *example.shape[1:])
            for target, row in zip(start[key], self._rows.tolist(), strict=True):
                rank, index = saved_at[row]
                target.copy_(states[rank]["states"][name][index])
        if start:  # empty if it was saved before a step
            self._allocate({key: state.to(self._device) for key, state in start.items()})

    def _prepare(self, batch: Batch) -> None:
        """Learn the states' shapes from a pass over a micro-batch, unless a checkpoint has set them."""
        if self._passes:
            return
        self._engine.eval()
        with torch.no_grad():
            ids = batch.input_ids.view(self._sampler.micro_batch, -1)
            cache = self._engine(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        self._engine.train()
        kinds = {RECURRENT: "recurrent_states", CONV: "conv_states"}
        # The inputs of a convolution are text, not memory.
        if self._source != "contiguous":
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

    def _allocate(self, start: Mapping[StateKey, Tensor]) -> None:
        """Keep `start`, and pass its rows to the micro-batches."""
        self._start = dict(start)
        micro_batch = self._sampler.micro_batch
        self._end = {key: torch.empty_like(state[:micro_batch]) for key, state in start.items()}
        layers = len(self._engine.module.config.layer_types)
        self._passes = [
            CarriedStates(self._views(number), self._end, layers)
            for number in range(self._sampler.accumulation)
        ]
        if self._source == "noise":
            heads = sum(state.shape[1] for state in start.values())
            self._sums = torch.zeros(3, heads, dtype=torch.float64, device=self._device)
            if not self._moments.numel():
                self._moments = torch.zeros_like(self._sums)

    def _views(self, number: int) -> dict[StateKey, Tensor]:
        """Return the rows of micro-batch `number`."""
        micro_batch = self._sampler.micro_batch
        first = number * micro_batch
        return {key: state[first : first + micro_batch] for key, state in self._start.items()}

    def _shuffle(self, step: int) -> None:
        """Give each row the state of another row, by a permutation of all ranks' rows."""
        rows, rank, world = self._sampler.global_batch, self._sampler.rank, self._sampler.world
        source = permute(np.arange(rows), rows, self._seed, step)
        owner, index = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
        for other, theirs in enumerate(self._rows_of):
            owner[theirs], index[theirs] = other, np.arange(len(theirs))
        # Source rows that each rank needs, in the order of its rows.
        wanted = [source[theirs] for theirs in self._rows_of]
        sent = [index[theirs[owner[theirs] == rank]] for theirs in wanted]
        # Rank that sends each received row. Rows arrive in the order of ranks.
        received = owner[wanted[rank]]
        sizes = np.bincount(received, minlength=world).tolist(), [len(rows) for rows in sent]
        taken = self._to_device(np.concatenate(sent))
        put = self._to_device(np.argsort(received, kind="stable"))
        for state in self._start.values():
            mine = arrived = state[taken]
            if world > 1:
                arrived = torch.empty_like(state)
                dist.all_to_all_single(arrived, mine, *sizes)
            state[put] = arrived

    def _draw(self, step: int) -> None:
        """Draw Gaussian states, each row's from a random stream that depends on seed, step and row."""
        generator = torch.Generator(self._device)
        for index, row in enumerate(self._rows.tolist()):
            seed = np.random.SeedSequence((self._seed, step, row)).generate_state(1, np.uint64)
            generator.manual_seed(int(seed[0]))
            for state in self._start.values():
                state[index].normal_(generator=generator)
        count, total, squares = self._moments
        mean = total / count.clamp(min=1e-30)
        deviation = (squares / count.clamp(min=1e-30) - mean.square()).clamp(min=0).sqrt()
        for state, heads in self._heads().values():
            if self._noise != "fitted":  # otherwise mean and deviation of each head's final states
                state.mul_(self._noise)
                continue
            shape = (1, -1, *[1] * (state.ndim - 2))
            state.mul_(deviation[heads].to(state).view(shape)).add_(mean[heads].to(state).view(shape))

    def _heads(self) -> dict[StateKey, tuple[Tensor, slice]]:
        """Return each state with the range of its heads (its second axis) among the heads of all states."""
        heads, first = {}, 0
        for key, state in self._start.items():
            heads[key] = state, slice(first, first + state.shape[1])
            first += state.shape[1]
        return heads

    def _to_device(self, values: np.ndarray) -> Tensor:
        return send(torch.from_numpy(values), self._device)


def _like(rows: Tensor, state: Tensor) -> Tensor:
    """Reshape one value for each row [R] to broadcast with a state [R, ...]."""
    return rows.view(-1, *[1] * (state.ndim - 1))
