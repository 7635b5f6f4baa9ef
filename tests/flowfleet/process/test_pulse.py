"""When work counts as stuck, by a clock of the test's own."""

import threading

import pytest

from flowfleet.process.pulse import SLACK, Pulse

HANG_S, PATIENT_S = 10.0, 100.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pulse(clock: Clock) -> Pulse:
    """Has done one quick piece of work of weight 4."""
    pulse = Pulse(HANG_S, PATIENT_S, clock=clock)
    with pulse.work("sample", 4.0):
        clock.passes(0.1)
    return pulse


def test_without_work_nothing_is_stuck(pulse: Pulse, clock: Clock) -> None:
    clock.passes(1e6)
    assert not pulse.is_stuck
    assert pulse.stalled_s() == 0.0
    with pulse.work("sample", 4.0):
        assert not pulse.is_stuck  # the time before does not count


def test_work_without_progress_is_stuck_and_a_beat_ends_that(pulse: Pulse, clock: Clock) -> None:
    with pulse.work("sample", 4.0):
        clock.passes(HANG_S)
        assert not pulse.is_stuck
        clock.passes(0.1)
        assert pulse.is_stuck
        pulse.beat()
        assert not pulse.is_stuck
    assert not pulse.is_stuck


def test_heavier_work_than_any_before_is_given_its_time_once(pulse: Pulse, clock: Clock) -> None:
    """It may compile or tune kernels; of another kind the first is heavier than any."""
    for kind, weight in (("sample", 4.1), ("decode", 1.0)):
        with pulse.work(kind, weight):
            clock.passes(3 * HANG_S)
            assert not pulse.is_stuck
            pulse.beat()
        with pulse.work(kind, weight):
            clock.passes(PATIENT_S + 0.1)
            assert pulse.is_stuck


def test_work_that_failed_proves_nothing(pulse: Pulse, clock: Clock) -> None:
    with pytest.raises(RuntimeError), pulse.work("sample", 5.0):
        raise RuntimeError
    with pulse.work("sample", 5.0):
        clock.passes(3 * HANG_S)
        assert not pulse.is_stuck


def test_a_slow_machine_is_not_a_stuck_one(pulse: Pulse, clock: Clock) -> None:
    """A gap of eight seconds between two beats was fine, so one of thirty is."""
    with pulse.work("sample", 4.0):
        clock.passes(8.0)
        pulse.beat()
        clock.passes(SLACK * 8.0)
        assert not pulse.is_stuck
        clock.passes(0.1)
        assert pulse.is_stuck


def test_no_limit_passes_that_of_loading(pulse: Pulse, clock: Clock) -> None:
    with pulse.work("sample", 5.0):
        clock.passes(0.9 * PATIENT_S)
        pulse.beat()
    with pulse.work("sample", 5.0):
        clock.passes(PATIENT_S)
        assert not pulse.is_stuck
        clock.passes(0.1)
        assert pulse.is_stuck


def test_loading_and_compiling_have_their_own_limit_and_are_no_measure(pulse: Pulse, clock: Clock) -> None:
    with pulse.work("prepare", patient=True):
        clock.passes(3 * HANG_S)
        assert not pulse.is_stuck
    with pulse.work("sample", 4.0):
        pulse.compiling(True)
        pulse.compiling(True)
        pulse.compiling(False)
        clock.passes(3 * HANG_S)
        assert not pulse.is_stuck
        pulse.compiling(False)
        clock.passes(HANG_S)
        assert not pulse.is_stuck
        clock.passes(0.1)
        assert pulse.is_stuck
    with pulse.work("prepare", patient=True):
        clock.passes(PATIENT_S + 0.1)
        assert pulse.is_stuck  # nothing loads for ever


def test_another_model_is_measured_anew(pulse: Pulse, clock: Clock) -> None:
    pulse.reset()
    with pulse.work("sample", 1.0):
        clock.passes(3 * HANG_S)
        assert not pulse.is_stuck


@pytest.mark.parametrize("shared", [False, True])
def test_one_stuck_thread_is_stuck_unless_the_others_do_its_work(shared: bool, clock: Clock) -> None:
    pulse, entered, leave = Pulse(HANG_S, PATIENT_S, shared=shared, clock=clock), threading.Event(), threading.Event()

    def waits() -> None:
        with pulse.work("sample"):
            entered.set()
            leave.wait(10)

    with pulse.work("sample"):
        pass
    thread = threading.Thread(target=waits)
    thread.start()
    entered.wait(10)
    for _ in range(int(2 * HANG_S)):
        with pulse.work("sample"):
            clock.passes(1.0)
    assert pulse.is_stuck is not shared
    clock.passes(HANG_S + 0.1)
    assert pulse.is_stuck
    leave.set()
    thread.join()
    assert not pulse.is_stuck
