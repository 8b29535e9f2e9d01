"""``deepspeed.runtime.dataloader``: the loader of ``training_data``, and one that never ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class DeepSpeedDataLoader:
    """Micro-batches of this rank's part of a dataset.

    As in DeepSpeed every pass has the same order unless ``data_sampler.set_epoch`` is called.

    Attributes:
        dataset: what was given.
        batch_size: samples per micro-batch.
        data_sampler: what chooses this rank's samples; None for an iterable dataset.
        dataloader: torch's loader.
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
        """Load rank ``rank``'s part of ``dataset``. An iterable dataset splits itself."""
        self.dataset = dataset
        self.batch_size = batch_size
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(
                dataset, num_replicas=world_size, rank=rank, shuffle=is_shuffled
            )
        self.data_sampler = data_sampler
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            num_workers=2 if num_workers is None else num_workers,
            drop_last=drop_last,
        )
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> DeepSpeedDataLoader:
        self._iterator = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.dataloader)
        return next(self._iterator)


class RepeatingLoader:
    """Starts ``loader`` again at its end."""

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
