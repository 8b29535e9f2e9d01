"""ZeRO in Lightning: ``Trainer(strategy="zero_stage_3_offload")``, after this import.

    import lightning as L
    import zero_engine.lightning

    L.Trainer(strategy="zero_stage_2", precision="bf16-mixed", devices=8).fit(module, loader)

`ZeroStrategy` takes any configuration of the engine. Processes, samplers, loggers, accumulation and
schedules are Lightning's own.
"""

try:
    import lightning.pytorch as _lightning
except ImportError as error:
    raise ImportError(
        "zero_engine.lightning needs the package lightning, which cannot be imported: "
        "pip install lightning"
    ) from error

from zero_engine.lightning.strategy import ZeroPrecision, ZeroStrategy

__all__ = ["ZeroPrecision", "ZeroStrategy"]

ZeroStrategy.register_strategies(_lightning.strategies.StrategyRegistry)
