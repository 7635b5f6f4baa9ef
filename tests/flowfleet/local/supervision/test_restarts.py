from flowfleet.local.supervision.child import FIRST_DELAY_S, LONGEST_DELAY_S, STABLE_AFTER_S, Backoff


def test_delays_double_up_to_the_longest_and_start_over_after_a_stable_run() -> None:
    backoff = Backoff()

    delays = [backoff.after(1.0) for _ in range(12)]

    assert delays == [min(FIRST_DELAY_S * 2**n, LONGEST_DELAY_S) for n in range(12)]
    assert backoff.after(STABLE_AFTER_S) == FIRST_DELAY_S
    assert backoff.after(0.0) == 2 * FIRST_DELAY_S
