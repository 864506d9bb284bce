"""The demo's first steps: a model traced into layers, and each layer measured."""

from burstpool.cli.demo_story import Story
from burstpool.cli.progress import progress_bar
from burstpool.cli.show import show_graph, show_profile

_BATCHES = (1, 4, 16, 64)


def trace_model(story: Story) -> None:
    """Shows the layers."""
    from burstpool.model.trace import trace

    example, _ = story.job.samples(4)
    story.traced = trace(story.job.build_model().train(), example)
    show_graph(story.traced.graph, story.console)
    story.figures["num_layers"] = len(story.traced.graph.layers)


def measure_layers(story: Story) -> None:
    """Measures them at batches up to what later steps may ask for, and says what small batches waste."""
    from burstpool.profiling.measure import profile

    assert story.traced is not None
    _, target = story.job.samples(4)
    batches = sorted({*_BATCHES, max(1, story.job.batch // story.num_devices), story.job.batch})
    with progress_bar("profiling") as progress:
        story.profile = profile(
            story.traced,
            batches=batches,
            loss=story.job.loss,
            target=target,
            name=story.job.name,
            use_cache=False,
            progress=progress,
        )
    show_profile(story.profile, story.console)
    small, large = batches[0], batches[-1]
    waste = (story.profile.step_time_s(small) / small) / (story.profile.step_time_s(large) / large)
    story.figures["sample_cost_ratio"] = waste
    story.say(
        f"\nA sample costs {waste:.1f}× as much at batch {small} as at batch {large}: what a job wastes when it is "
        "spread thin over many devices, and what Burstpool is there to win back.",
        style="bold",
    )
