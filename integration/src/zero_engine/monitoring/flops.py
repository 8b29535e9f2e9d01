"""``flops_profiler``: the floating-point operations of one step, counted by torch.

`torch.utils.flop_counter.FlopCounterMode` counts what matrix products, convolutions and attention
do, in forward by module; a backward of the engine's is counted too, recomputation included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from torch.utils.flop_counter import FlopCounterMode

from zero_engine.monitoring.monitors import StepFacts, StepObserver
from zero_engine.monitoring.settings import FlopsProfilerSettings

_ALL = "Global"
"""What torch calls the sum over modules."""


class FlopsProfiler(StepObserver):
    """Counter of the micro-steps of step ``profile_step`` on this rank, printed at its end."""

    def __init__(self, settings: FlopsProfilerSettings, *, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._step = 0
        self._counter: FlopCounterMode | None = None
        self.forward: dict[str, int] = defaultdict(int)  # operations by module's name
        self.backward = 0  # operations
        self._is_backward_counted = True

    def begin_forward(self) -> None:
        if self._step == self._settings.profile_step and self._counter is None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    begin_backward = begin_forward

    def end_forward(self) -> None:
        for module, by_operator in self._end().items():
            self.forward[module] += sum(by_operator.values())

    def end_backward(self) -> None:
        self.backward += sum(self._end().get(_ALL, {}).values())

    def begin_plain_backward(self) -> None:
        """Note that it is not counted: no counter can be put under a backward that runs already."""
        if self._step == self._settings.profile_step:
            self._is_backward_counted = False

    def end_plain_backward(self) -> None:
        pass

    def step_done(self, facts: StepFacts) -> None:
        if self._step == self._settings.profile_step:
            self._write()
        self._step = facts.global_steps

    def report(self) -> str:
        total = self.forward[_ALL]
        backward = (
            f"{self.backward:,}"
            if self._is_backward_counted
            else "not counted: call engine.backward(loss) in place of loss.backward()"
        )
        lines = [
            f"floating-point operations of step {self._settings.profile_step} on this rank",
            f"forward:  {total:,}",
            f"backward: {backward}",
        ]
        names = sorted(name for name in self.forward if name != _ALL)
        deepest = self._settings.module_depth
        kept = [name for name in names if deepest < 0 or name.count(".") <= deepest]
        for depth in sorted({name.count(".") for name in kept}):
            level = [name for name in kept if name.count(".") == depth]
            most = sorted(level, key=lambda name: -self.forward[name])
            top = ", ".join(self._row(n, total) for n in most[: self._settings.top_modules])
            lines.append(f"most at depth {depth}: {top}")
        if self._settings.detailed:
            lines += [f"  {self._row(name, total)}" for name in kept]
        return "\n".join(lines)

    def _row(self, name: str, total: int) -> str:
        return f"{name} {self.forward[name]:,} ({self.forward[name] / max(total, 1):.1%})"

    def _end(self) -> dict[str, dict[object, int]]:
        counter, self._counter = self._counter, None
        if counter is None:
            return {}
        counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return dict(counter.get_flop_counts())

    def _write(self) -> None:
        text = self.report()
        if self._settings.output_file is None:
            self._say(text)
        else:
            path = Path(self._settings.output_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
