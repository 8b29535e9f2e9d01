"""Plans with the predicted time of a step, and the fastest configuration that fits.

calibration = Calibration.from_json(json.loads(Path("rates.json").read_text()), "rates.json")
found = plan(model, "zero.json", 64, example_inputs=[x], calibration=calibration)
print(found.step_time.total_s, *found.reasons)
"""

from zero_engine.planning.rates import Calibration, Curve, Rates
from zero_engine.planning.search import TimedChoice, TimedPlan, plan

__all__ = ["Calibration", "Curve", "Rates", "TimedChoice", "TimedPlan", "plan"]
