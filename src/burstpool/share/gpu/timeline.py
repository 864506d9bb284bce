"""What ran when on a shared GPU: the last steps of the foreground, and the background's pieces, as a Timeline."""

from burstpool.report.timeline import WHOLE_STEP, Event, Timeline
from burstpool.share.gpu.loop import SharedGpu


def timeline_of(gpu: SharedGpu, steps: int) -> Timeline | None:
    """The last steps on the device: the foreground's compute, and the background's pieces."""
    spans = list(gpu.spans)[-steps:] if steps else []
    if not spans or not gpu.measured.step_s:
        return None
    first = spans[0].begin
    events: list[Event] = []
    for number, span in enumerate(spans):
        events.append(
            Event(
                device=0,
                lane="compute",
                kind=WHOLE_STEP,
                block=gpu.foreground.name,
                start_s=float(first.elapsed_time(span.begin)) / 1e3,
                stop_s=float(first.elapsed_time(span.end)) / 1e3,
                step=number,
            )
        )
        events += [
            Event(
                device=0,
                lane="background",
                kind="background",
                block=piece.name,
                start_s=float(first.elapsed_time(piece.begin)) / 1e3,
                stop_s=float(first.elapsed_time(piece.end)) / 1e3,
                step=number,
            )
            for piece in span.pieces
        ]
    measured = gpu.measured.step_s
    return Timeline(
        source="measured",
        num_devices=1,
        step_time_s=sum(measured) / len(measured),
        events=tuple(sorted(events, key=lambda event: event.start_s)),
    )
