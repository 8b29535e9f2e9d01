"""The object model: a unit, its flat parameters, its flat gradients, and the memory behind them."""
