"""``deepspeed.runtime.dataloader``: the loader of ``training_data``, and a repeating loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class DeepSpeedDataLoader(DataLoader[Any]):
    """DataLoader of a rank's micro-batches, on which ``next`` can be called.

    With the default sampler, a `DistributedSampler`, every pass has the same order unless
    ``sampler.set_epoch`` is called, as in DeepSpeed.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        is_shuffled: bool = True,
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(
                dataset, num_replicas=world_size, rank=rank, shuffle=is_shuffled
            )
        self.data_sampler = data_sampler
        self._batches: Iterator[Any] | None = None
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            num_workers=2 if num_workers is None else num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
        )

    @property
    def dataloader(self) -> DeepSpeedDataLoader:
        return self

    def __iter__(self) -> DeepSpeedDataLoader:  # type: ignore[override]
        self._batches = super().__iter__()
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = super().__iter__()
        return next(self._batches)


class RepeatingLoader:
    """An endless iterator, which restarts ``loader`` at its end."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
