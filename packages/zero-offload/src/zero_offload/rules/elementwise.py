"""Optimizers with an elementwise update, which may be split at any element.

An update is elementwise when the new value of an element and of its state depends on nothing but
that element, its gradient, its state, and scalars that count updates. Only then can one parameter
be cut in two and each half be updated in another place (Twin-Flow, ZeRO-Offload++).
"""

from __future__ import annotations

from torch import optim

from zero_offload.protocols import ElementwiseOptimizer, OptimizerClass

ELEMENTWISE: frozenset[OptimizerClass] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""torch's optimizers with an elementwise update. A subclass may differ and is not one of them."""


def check_elementwise(optimizer_class: OptimizerClass) -> None:
    """Raise ValueError unless the class may be split.

    A class of the user's declares it by the class attribute ``is_elementwise = True``.
    """
    if optimizer_class in ELEMENTWISE:
        return
    declared: object = optimizer_class
    if isinstance(declared, ElementwiseOptimizer) and declared.is_elementwise is True:
        return
    known = ", ".join(sorted(cls.__name__ for cls in ELEMENTWISE))
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    raise ValueError(
        f"{name} cannot be offloaded: its update is not known to be elementwise. Use one of "
        f"{known}, or, if each element is updated by itself, set `is_elementwise = True` on the "
        f"class."
    )
