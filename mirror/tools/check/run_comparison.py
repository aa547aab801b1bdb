"""Compares the recorded runs of one program: equal, different and where, or not comparable."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from mirror.replica.modules.verified_calls import WRITTEN
from mirror.tools.check.causes import explain_difference, explain_error
from mirror.tools.check.check_result import DIFFERENT, EQUAL, NOT_COMPARABLE, CheckResult
from mirror.tools.check.differences import (
    Difference,
    Tolerances,
    align,
    find_differences,
    find_first_deep,
    is_rounding,
    largest_spreads,
    shallow_events,
)
from mirror.tools.check.fingerprint import relative_distance
from mirror.tools.check.record import (
    BUFFER,
    GRADIENT,
    INPUT,
    LOSS,
    PARAMETER,
    Record,
    RecordOptions,
)

_GROSS = 0.02  # a relative distance that rounding in float32 does not make in one step
_CHAOTIC = 1e-3  # a spread of one device that is looked into
_WARNED = re.compile(r"(?:UserWarning|WARNING).{0,600}?(?:replica|one device)", re.DOTALL)


class RunComparison:
    """The comparison of one device with the replicas of a strategy.

    Args:
        record: runs the program; the first argument is the title of the run.
        one: the run on one device.
        options: of that run.
        replicas, devices: those of the strategy.
        tolerance: the largest relative distance that counts as rounding; ``"auto"``: measured.
    """

    def __init__(
        self,
        record: Callable[[str, RecordOptions], Record],
        one: Record,
        options: RecordOptions,
        *,
        replicas: int,
        devices: Sequence[str] | None = None,
        tolerance: float | str,
    ) -> None:
        self._record, self._one, self._options = record, one, options
        self._replicas = len(devices or ()) or replicas
        title = f"on {self._replicas} replica{'s' * (self._replicas != 1)}"
        self._many = record(title, replace(options, replicas=self._replicas, devices=devices))
        self._is_given = not isinstance(tolerance, str)
        self._tolerances = Tolerances(one, None if isinstance(tolerance, str) else tolerance)
        self._spread: Record | None = None

    def result(self) -> CheckResult:
        """Returns the result of the check."""
        one, many = self._one, self._many
        if many.ending == "error" and many.error is not None and one.ending != "error":
            return self._explain_error()
        suspects = list(
            find_differences(shallow_events(one), shallow_events(many), self._tolerances)
        )
        found = self._find_beyond_rounding(suspects)
        if found is None and one.num_steps == many.num_steps:
            is_chaotic = self._spread is not None and self._largest_spread(self._spread) > _CHAOTIC
            if is_chaotic and (step := self._first_unrepeated_step(one.num_steps)):
                return self._unrepeatable(step)
            bad_step = self._first_bad_step()
            if bad_step == 1:
                return self._not_a_number()
            return self._unequal_call() if many.unequal_calls else self._equal(bad_step)
        if found is None:
            return CheckResult(
                DIFFERENT,
                f"different: {one.num_steps} optimizer steps on one device, {many.num_steps} on "
                f"{self._replicas} replicas",
                steps=min(one.num_steps, many.num_steps),
                replicas=self._replicas,
                cause="another number of steps",
                remedy="look at what ends the loop: it depends on the replicas",
            )
        if self._needs_repeat(found):
            if step := self._first_unrepeated_step(found.event.step):
                return self._unrepeatable(step)
        return self._report_difference(found)

    def _find_beyond_rounding(self, suspects: list[Difference]) -> Difference | None:
        """Returns the first difference that rounding does not explain."""
        if not suspects or self._is_given:
            return suspects[0] if suspects else None
        first = suspects[0]
        all_steps = self._one.num_steps
        is_gross = first.distance > max(_GROSS, 8 * self._tolerances.unit)
        for steps in dict.fromkeys([first.event.step if is_gross else all_steps, all_steps]):
            noisy_options = replace(self._options, steps=steps, rounding_noise=True)
            self._spread = self._record("on one device, with rounding errors", noisy_options)
            noisy = shallow_events(self._spread)
            spreads = largest_spreads(shallow_events(self._one), noisy)
            for suspect in suspects:
                if suspect.event.step > steps:
                    break
                if suspect.one is None:
                    return suspect
                b = noisy[suspect.index] if suspect.index < len(noisy) else None
                if b is not None and b.key != suspect.one.key:
                    b = None
                if not is_rounding(suspect, suspect.one, b, spreads.get(suspect.index, 0.0)):
                    return suspect
        return None

    def _needs_repeat(self, found: Difference) -> bool:
        if found.event.kind == INPUT or found.reason != "values":
            return True
        if self._spread is None or found.one is None:
            return self._is_given
        for (_, step), distance in _distances(self._one, self._spread).items():
            if step <= found.event.step and distance > _CHAOTIC:  # perhaps not by rounding
                return True
        noisy = shallow_events(self._spread)
        if found.index >= len(noisy) or noisy[found.index].key != found.one.key:
            return True
        a, b = found.one.prints[0], noisy[found.index].prints[0]
        return relative_distance(a.distance(b), a.norm) > max(_CHAOTIC, 4 * self._tolerances.unit)

    def _first_unrepeated_step(self, steps: int) -> int:
        """Returns the step in which two runs on one device differ; 0 if they do not."""
        again = self._record("on one device again", replace(self._options, steps=steps))
        one = [event for event in shallow_events(self._one) if event.step <= steps]
        other = [event for event in shallow_events(again) if event.step <= steps]
        for difference in find_differences(one, other, self._tolerances):
            if difference.distance > 1e-2 or difference.event.kind == INPUT:
                return difference.event.step
        return 0

    def _largest_spread(self, spread: Record) -> float:
        return max(self._spread_by_step(spread).values(), default=0.0)

    def _spread_by_step(self, spread: Record) -> dict[int, float]:
        """Returns how far rounding errors carry outputs, losses and buffers of each step."""
        largest: dict[int, float] = {}
        for (kind, step), distance in _distances(self._one, spread).items():
            if kind not in (GRADIENT, PARAMETER):
                largest[step] = max(largest.get(step, 0.0), distance)
        return largest

    def _first_bad_step(self) -> int:
        """Returns the step from which on all losses are NaN or infinite; 0 if there is none."""
        bad: dict[int, bool] = {}
        for event in shallow_events(self._one):
            if event.kind == LOSS and event.prints:
                bad[event.step] = bad.get(event.step, True) and event.prints[0].num_bad > 0
        first = 0
        for step in sorted(bad):
            first = (first or step) if bad[step] else 0
        return first

    # Results

    def _unequal_call(self) -> CheckResult:
        """Returns the result of a run whose training is equal, but not its split calls."""
        first = self._many.unequal_calls[0]
        return CheckResult(
            DIFFERENT,
            f"different: the training is equal, and the outputs of a split call are not: {first}",
            steps=self._one.num_steps,
            replicas=self._replicas,
            quantity="output",
            cause="outputs that do not join into those of the whole batch",
            why=first,
            remedy="return tensors that have the examples as their first dimension, or call the "
            "module inside strategy.run",
            reported=True,
        )

    def _not_a_number(self) -> CheckResult:
        return CheckResult(
            NOT_COMPARABLE,
            "cannot be compared: the loss is NaN or infinite from step 1 on, on one device too",
            replicas=self._replicas,
            step=1,
            cause="no finite loss",
            why="NaN counts as equal to NaN, so an error of the replicas would not be found",
            remedy="find out why on one device; torch.autograd.detect_anomaly() may help",
        )

    def _equal(self, bad_step: int) -> CheckResult:
        largest = max(_distances(self._one, self._many).values(), default=0.0)
        steps, dtype = self._one.num_steps, self._dtype()
        if bad_step:  # later steps show nothing
            steps = bad_step - 1
        result = CheckResult(
            EQUAL,
            f"equal: {steps} step{'s' * (steps != 1)}, largest difference {largest:.0e} ({dtype})",
            steps=steps,
            replicas=self._replicas,
            largest_difference=largest,
            dtype=dtype,
        )
        if self._spread is not None:
            spread = self._largest_spread(self._spread)
            result.why = (
                "some values differ by more than their last digits, but not by more than rounding "
                f"errors change this script on one device ({spread:.0e})"
            )
            by_step = self._spread_by_step(self._spread)
            if step := next((s for s in sorted(by_step) if by_step[s] > _GROSS), 0):
                result.why += (
                    f"; from step {step} on these errors are so large that small differences do "
                    "not show: a lower learning rate, or --double, shows more"
                )
        if bad_step:
            why = f"from step {bad_step} on the loss is NaN or infinite, on one device as well"
            result.why = "; ".join(filter(None, [result.why, why]))
        return result

    def _dtype(self) -> str:
        order = ("bfloat16", "float16", "float32", "float64")
        return next((d for d in order if d in self._one.dtypes), "float32")

    def _unrepeatable(self, step: int) -> CheckResult:
        return CheckResult(
            NOT_COMPARABLE,
            f"cannot be compared: two runs on one device differ already, from step {step} on",
            steps=step,
            replicas=self._replicas,
            step=step,
            cause="not repeatable",
            why="all generators of torch, NumPy and Python are seeded; the script draws from "
            "another one (numpy.random.default_rng() without a seed, os.urandom), depends on the "
            "time, or resumes from files that it has written itself",
            remedy="seed that generator, or delete those files before each run",
        )

    def _explain_error(self) -> CheckResult:
        many = self._many
        assert many.error is not None
        where = f" at {many.error['line']}" if many.error.get("line") else ""
        result = CheckResult(
            DIFFERENT,
            f"different: trains on one device, and on {self._replicas} replicas raises "
            f"{many.error.get('type') or 'an error'} in step {many.num_steps + 1}{where}",
            steps=many.num_steps,
            replicas=self._replicas,
            step=many.num_steps + 1,
            line=many.error.get("line", ""),
            quantity="error",
            name=many.error.get("type", ""),
        )
        result.reported = True
        return explain_error(result, many.error)

    def _report_difference(self, found: Difference) -> CheckResult:
        one, many = self._one, self._many
        step = found.event.step
        deep, one_events, many_events = find_first_deep(
            one, many, self._spread, step, self._tolerances
        )
        event = found.event
        result = CheckResult(
            DIFFERENT,
            steps=one.num_steps,
            replicas=self._replicas,
            largest_difference=found.distance,
            dtype=self._dtype(),
            step=step,
            quantity=event.kind,
            name=event.name,
            reported=bool(_WARNED.search(many.output)),
        )
        explain_difference(result, found, deep, one_events, many_events, one, many)
        written = next((call for call in many.unequal_calls if WRITTEN in call), "")
        if event.kind == PARAMETER and written:
            result.cause = "a parameter that forward writes"
            result.why, _, result.remedy = written.partition(". ")
        what = f"{event.kind} of {event.name}" if event.kind != "loss" else "the loss"
        size = f" by {found.distance:.0e}" if found.distance < float("inf") else ""
        at = f", in module {result.module}" if result.module else ""
        result.summary = f"different: from step {step} on, first {what}{size}{at}: {result.cause}"
        return result


def _distances(one: Record, other: Record) -> dict[tuple[str, int], float]:
    """Returns the relative distances of two runs, by quantity and step.

    Gradients, parameters and buffers count together: one that is nothing but rounding has no scale
    of its own.
    """
    totals: dict[tuple[str, int], list[float]] = {}
    for _, a, b in align(shallow_events(one), shallow_events(other)):
        if a is None or b is None or a.key != b.key:
            continue
        print_of_one, print_of_other = a.prints[0], b.prints[0]
        if print_of_one.is_float and print_of_one.shape == print_of_other.shape:
            is_joint = a.kind in (GRADIENT, PARAMETER, BUFFER)
            key = a.kind if is_joint else f"{a.kind} {a.name}"
            total = totals.setdefault((key, a.step), [0.0, 0.0])
            total[0] += print_of_one.distance(print_of_other) ** 2
            total[1] += print_of_one.norm**2
    return {key: relative_distance(d**0.5, n**0.5) for key, (d, n) in totals.items()}
