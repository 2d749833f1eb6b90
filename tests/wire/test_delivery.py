"""The sender's view of the link, on hand-made timelines."""

from __future__ import annotations

import pytest

from wire.delivery import DeliveryMeter, DeliverySample

SEGMENT = 32 * 1024


def run_link(
    meter: DeliveryMeter, *, rate: float, delay_s: float, sizes: list[int], now: float = 0.0
) -> list[DeliverySample]:
    """Send segments through a link of a fixed rate as the window allows; return the samples."""
    samples: list[DeliverySample] = []
    flying: list[tuple[float, object]] = []
    busy_until, queue = now, list(sizes)
    while queue or flying:
        while queue and (
            not meter.in_flight_bytes
            or meter.in_flight_bytes + queue[0] <= meter.window_bytes(segment_bytes=SEGMENT)
        ):
            size = queue.pop(0)
            room = meter.window_bytes(segment_bytes=SEGMENT) - meter.in_flight_bytes
            mark = meter.on_sent(size, window_full=2 * size > room, now=now)
            busy_until = max(busy_until, now) + size / rate
            flying.append((busy_until + delay_s, mark))
        if not queue:
            meter.on_nothing_to_send()
        now, acked = flying.pop(0)
        sample = meter.on_acked([acked], now=now)  # type: ignore[list-item]
        assert sample is not None
        samples.append(sample)
    return samples


@pytest.mark.parametrize("rate", [1e5, 2e6, 2e7])
def test_steady_link_is_measured_within_one_percent(rate: float) -> None:
    meter = DeliveryMeter()
    run_link(meter, rate=rate, delay_s=0.02, sizes=[SEGMENT] * 400)
    assert meter.rate_bytes_per_s == pytest.approx(rate, rel=0.01)


def test_window_keeps_a_steady_link_full() -> None:
    meter = DeliveryMeter()
    samples = run_link(meter, rate=2e6, delay_s=0.05, sizes=[SEGMENT] * 400)
    late = samples[100:-10]
    assert sum(s.bytes_per_s for s in late) / len(late) == pytest.approx(2e6, rel=0.02)


def test_first_flight_is_only_a_lower_bound() -> None:
    # A descriptor of 200 bytes goes ahead of the first segment: 200 bytes in a round trip of 20 ms
    # would be 10 kB/s on a link of 2 MB/s.
    samples = run_link(DeliveryMeter(), rate=2e6, delay_s=0.02, sizes=[200, *[SEGMENT] * 40])
    assert samples[0].bytes_per_s < 20_000
    assert samples[0].sender_limited
    honest = [s for s in samples if not (s.sender_limited or s.window_limited)]
    assert honest
    assert min(s.bytes_per_s for s in honest) > 0.5 * 2e6


def test_flight_after_an_idle_stretch_never_lowers_the_rate() -> None:
    meter = DeliveryMeter()
    run_link(meter, rate=2e6, delay_s=0.02, sizes=[SEGMENT] * 100)
    before = meter.rate_bytes_per_s
    assert before is not None
    samples = run_link(meter, rate=2e6, delay_s=0.02, sizes=[300], now=60.0)
    assert samples[0].sender_limited
    assert meter.rate_bytes_per_s == before


def test_samples_limited_by_the_window_never_lower_the_rate() -> None:
    meter = DeliveryMeter()
    mark = meter.on_sent(SEGMENT, window_full=False, now=0.0)
    meter.on_acked([mark], now=0.01)
    fast = meter.rate_bytes_per_s
    for step in range(1, 20):
        mark = meter.on_sent(SEGMENT, window_full=True, now=float(step))
        sample = meter.on_acked([mark], now=step + 0.012)
        assert sample is not None
        assert sample.window_limited
    assert meter.rate_bytes_per_s == fast
