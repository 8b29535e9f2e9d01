"""Parts of `OffloadedOptimizer`, for torch loops without an engine."""
