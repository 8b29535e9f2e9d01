"""The pack: one module per family of public scripts."""

from cases import Case, Planned

from families import (
    accelerated,
    engines,
    examples,
    lightning_pages,
    quantized,
    ray_pages,
    trainers,
    trl_scripts,
)

PACK: list[Case] = [
    *trl_scripts.CASES,
    *trainers.CASES,
    *engines.CASES,
    *examples.CASES,
    *accelerated.CASES,
    *lightning_pages.CASES,
    *quantized.CASES,
    *ray_pages.CASES,
]
PLANNED: list[Planned] = []
